// Rounding in one pass with what a quantized all-reduce does around it: shares of a mean to their owners, sums and their mean back to all.
// The specification is sparsync/kernels/share_reference.py. A block stays in the first cache; whole vectors are read and written once.
#pragma once

#include <cstdint>
#include <cstring>

#include "values.hpp"

namespace sparsync {
namespace {

// Eight values of a block out of the `bits` bytes of their codes; `scale` holds two for 2 bits.
#ifdef __AVX2__
template <int bits>
SPARSYNC_INLINE __m256i shifts_to(int top) {  // that bring each code to the bits below `top`
    return _mm256_sub_epi32(_mm256_set1_epi32(top), _mm256_mullo_epi32(_mm256_set1_epi32(bits), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)));
}

template <int bits>
SPARSYNC_INLINE void decode_octet(const float *scale, uint32_t word, float *out) {
    const __m256i words = _mm256_set1_epi32(static_cast<int32_t>(word));
    const __m256 low = _mm256_set1_ps(scale[0]);
    if constexpr (bits > 2) {
        const __m256i code = _mm256_srai_epi32(_mm256_sllv_epi32(words, shifts_to<bits>(32 - bits)), 32 - bits);
        _mm256_storeu_ps(out, _mm256_mul_ps(_mm256_cvtepi32_ps(code), low));
    } else {
        __m256 magnitude = low;
        if constexpr (bits == 2) {  // the mask of a blend is the top bit
            const __m256i above = _mm256_sllv_epi32(words, shifts_to<bits>(30));
            magnitude = _mm256_blendv_ps(low, _mm256_set1_ps(scale[1]), _mm256_castsi256_ps(above));
        }
        const __m256i negative = _mm256_slli_epi32(_mm256_srlv_epi32(words, shifts_to<-bits>(0)), 31);
        _mm256_storeu_ps(out, _mm256_xor_ps(magnitude, _mm256_castsi256_ps(negative)));
    }
}
#else
template <int bits>
SPARSYNC_INLINE void decode_octet(const float *scale, uint32_t word, float *out) {
    if constexpr (bits > 2) {
        for (int b = 0; b < 8; ++b) {
            const int32_t code = static_cast<int32_t>(word << (32 - bits - bits * b)) >> (32 - bits);
            out[b] = static_cast<float>(code) * scale[0];
        }
    } else {
        const uint32_t low = bits_of(scale[0]), difference = bits == 2 ? low ^ bits_of(scale[1]) : 0;
        for (int b = 0; b < 8; ++b) {
            const uint32_t code = word >> bits * b, above = 0u - (code >> 1 & 1);
            out[b] = float_of((low ^ (difference & above)) ^ code << 31);
        }
    }
}
#endif

// The bytes of eight codes. Three of them are put together without a way through memory, which would wait for the last store.
template <int bits>
SPARSYNC_INLINE uint32_t word_of(const uint8_t *stream) {
    if constexpr (bits == 3) return stream[0] | static_cast<uint32_t>(stream[1]) << 8 | static_cast<uint32_t>(stream[2]) << 16;
    uint32_t word = 0;
    std::memcpy(&word, stream, bits);
    return word;
}

// The values of a block of at most 256, of which `scale` points at the scales in the packet.
template <int bits>
SPARSYNC_INLINE void decode_block(const uint8_t *scale, const uint8_t *stream, int64_t count, float *out) {
    const float scales[2] = {get_scale(scale), get_scale(scale + (bits == 2 ? 2 : 0))};
    int64_t j = 0;
    if constexpr (bits == 8) {
        for (; j < count; ++j) out[j] = static_cast<float>(static_cast<int8_t>(stream[j])) * scales[0];
    } else {
        for (; j + 8 <= count; j += 8, stream += bits) {
            decode_octet<bits>(scales, word_of<bits>(stream), out + j);
        }
        if (j < count) {
            uint32_t word = 0;
            float eight[8];
            std::memcpy(&word, stream, static_cast<size_t>(nbytes_of(count - j, bits)));
            decode_octet<bits>(scales, word, eight);
            std::memcpy(out + j, eight, static_cast<size_t>(count - j) * sizeof *out);
        }
    }
}

// The same for any number of bits: what a block costs is not noticed, and one copy of each format is compiled.
void decode_some(int bits, const uint8_t *scale, const uint8_t *stream, int64_t count, float *out) {
    if (bits == 8) decode_block<8>(scale, stream, count, out);
    if (bits == 4) decode_block<4>(scale, stream, count, out);
    if (bits == 3) decode_block<3>(scale, stream, count, out);
    if (bits == 2) decode_block<2>(scale, stream, count, out);
    if (bits == 1) decode_block<1>(scale, stream, count, out);
}

void encode_some(int bits, const float *value, int64_t count, uint8_t *scale, uint8_t *stream) {
    if (bits == 8) scaled_encode_block(value, count, 8, nullptr, scale, stream);
    if (bits == 4) scaled_encode_block(value, count, 4, nullptr, scale, stream);
    if (bits == 3) scaled_encode_block(value, count, 3, nullptr, scale, stream);
    if (bits == 2) means_encode_block(value, count, 2, scale, stream);
    if (bits == 1) means_encode_block(value, count, 1, scale, stream);
}

// Where the scales and the codes of the block are that begins with element `i` of `k`.
template <class Byte>
struct Packet {
    Byte *bytes;
    int64_t k;
    int bits;
    Byte *scale(int64_t i) const { return bytes + i / value_block * scales_nbytes(); }
    Byte *stream(int64_t i) const { return bytes + nblocks(k, value_block) * scales_nbytes() + i / 8 * bits; }

  private:
    int64_t scales_nbytes() const { return bits == 2 ? 4 : 2; }
};

void decode_some(const Packet<const uint8_t> &packet, int64_t i, int64_t count, float *out) {
    decode_some(packet.bits, packet.scale(i), packet.stream(i), count, out);
}

// Encodes a block, and decodes it again.
void round_some(const Packet<uint8_t> &packet, int64_t i, int64_t count, const float *value, float *decoded) {
    encode_some(packet.bits, value, count, packet.scale(i), packet.stream(i));
    decode_some(packet.bits, packet.scale(i), packet.stream(i), count, decoded);
}

// The constant by which all numbers of a pass are divided: by a power of two they are multiplied, which rounds the same number.
template <class Number>
struct Divisor {
    Number by, factor;
    bool exact;
    explicit Divisor(int64_t P) : by(static_cast<Number>(P)), factor(1 / by), exact((P & (P - 1)) == 0) {}
};

// value -= times * received, which is computed in double where float32 does not hold the product.
SPARSYNC_INLINE void subtract(float *value, const float *received, int64_t count, float times) {
    alignas(64) float error[value_block];
    uint32_t greatest = 0;
    for (int64_t j = 0; j < count; ++j) {
        error[j] = value[j] - times * received[j];
        const uint32_t magnitude = bits_of(error[j]) & 0x7FFFFFFF;
        greatest = magnitude > greatest ? magnitude : greatest;
    }
    if (greatest >= infinite_bits)
        for (int64_t j = 0; j < count; ++j)
            if ((bits_of(error[j]) & 0x7FFFFFFF) >= infinite_bits)
                error[j] = static_cast<float>(static_cast<double>(value[j]) -
                                              static_cast<double>(times) * static_cast<double>(received[j]));
    std::memcpy(value, error, static_cast<size_t>(count) * sizeof *value);
}

// The packet of value / P, and in the place of the values what P times the decoded packet lacks of them.
void encode_share(float *value, int64_t k, int bits, int64_t P, uint8_t *out) {
    const Divisor<float> divisor(P);
    const Packet<uint8_t> packet{out, k, bits};
    alignas(64) float share[value_block], received[value_block];
    for (int64_t i = 0; i < k; i += value_block) {
        const int64_t count = least(value_block, k - i);
        if (divisor.exact)
            for (int64_t j = 0; j < count; ++j) share[j] = value[i + j] * divisor.factor;
        else
            for (int64_t j = 0; j < count; ++j) share[j] = value[i + j] / divisor.by;
        round_some(packet, i, count, share, received);
        subtract(value + i, received, count, divisor.by);
    }
}

// The mean in float32; of finite sums it is finite.
SPARSYNC_INLINE float rounded(double mean) {
    constexpr double largest = static_cast<double>(3.40282346638528859812e+38f);
    const double below = mean < largest ? mean : largest, both = below > -largest ? below : -largest;
    return static_cast<float>(mean - mean == 0.0 ? both : mean);
}

// Adds P times what each packet stands for to the values, and writes the packet of their mean, the sums / P; the values become what P
// times that lacks of the sums. Sums are made in double, in which those of a few quantized values are exact.
void reduce_shares(
    float *value, int64_t k, const uint8_t *const *packets, int64_t sources, int bits, int64_t P, int bits_down, uint8_t *out) {
    const Divisor<double> divisor(P);
    const Packet<uint8_t> packet{out, k, bits_down};
    alignas(64) double total[value_block];
    alignas(64) float decoded[value_block], mean[value_block];
    for (int64_t i = 0; i < k; i += value_block) {
        const int64_t count = least(value_block, k - i);
        for (int64_t j = 0; j < count; ++j) total[j] = static_cast<double>(value[i + j]);
        for (int64_t source = 0; source < sources; ++source) {
            decode_some({packets[source], k, bits}, i, count, decoded);
            for (int64_t j = 0; j < count; ++j) total[j] += divisor.by * static_cast<double>(decoded[j]);
        }
        if (divisor.exact)
            for (int64_t j = 0; j < count; ++j) mean[j] = rounded(total[j] * divisor.factor);
        else
            for (int64_t j = 0; j < count; ++j) mean[j] = rounded(total[j] / divisor.by);
        round_some(packet, i, count, mean, decoded);
        for (int64_t j = 0; j < count; ++j)
            value[i + j] = static_cast<float>(total[j] - divisor.by * static_cast<double>(decoded[j]));
    }
}

// The values of a packet to `out`; what stood there before goes to `kept`, unless that is null.
void decode_over(const uint8_t *bytes, int64_t k, int bits, float *out, float *kept) {
    const Packet<const uint8_t> packet{bytes, k, bits};
    for (int64_t i = 0; i < k; i += value_block) {
        const int64_t count = least(value_block, k - i);
        if (kept) std::memcpy(kept + i, out + i, static_cast<size_t>(count) * sizeof *out);
        decode_some(packet, i, count, out + i);
    }
}

}  // namespace
}  // namespace sparsync
