// Rounding in one pass with what a quantized all-reduce does around it: shares of a mean to their owners, sums and their mean back to all.
// The specification is sparsync/kernels/share_reference.py. A block stays in the first cache; whole vectors are read and written once.
#pragma once

#include <cstdint>
#include <cstring>

#include "values.hpp"

namespace sparsync {
namespace {

template <int bits>
constexpr int scales_of = bits == 2 ? 2 : 1;
constexpr float largest_float = 3.40282346638528859812e+38f;

// Runs work(width), whose value is the constant `bits`.
template <class Work>
SPARSYNC_INLINE void with_bits(int bits, Work work) {
    if (bits == 8) work(std::integral_constant<int, 8>());
    if (bits == 4) work(std::integral_constant<int, 4>());
    if (bits == 3) work(std::integral_constant<int, 3>());
    if (bits == 2) work(std::integral_constant<int, 2>());
    if (bits == 1) work(std::integral_constant<int, 1>());
}

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
    const float scales[2] = {get_scale(scale), get_scale(scale + 2 * (scales_of<bits> - 1))};
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

template <int bits>
SPARSYNC_INLINE void encode_block(const float *value, int64_t count, uint8_t *scale, uint8_t *stream) {
    if constexpr (bits > 2)
        scaled_encode_block(value, count, bits, nullptr, scale, stream);
    else
        means_encode_block(value, count, bits, scale, stream);
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
    with_bits(bits, [=](auto width) {
        constexpr int each = width;
        uint8_t *scale = out, *stream = out + 2 * scales_of<each> * nblocks(k, value_block);
        alignas(64) float share[value_block], received[value_block];
        for (int64_t i = 0; i < k; i += value_block, scale += 2 * scales_of<each>, stream += value_block / 8 * each) {
            const int64_t count = least(value_block, k - i);
            if (divisor.exact)
                for (int64_t j = 0; j < count; ++j) share[j] = value[i + j] * divisor.factor;
            else
                for (int64_t j = 0; j < count; ++j) share[j] = value[i + j] / divisor.by;
            encode_block<each>(share, count, scale, stream);
            decode_block<each>(scale, stream, count, received);
            subtract(value + i, received, count, divisor.by);
        }
    });
}

// Adds P times what each packet stands for to the values, and writes the packet of their mean, the sums / P; the values become what P
// times that lacks of the sums. Sums are made in double, in which those of a few quantized values are exact.
void reduce_shares(
    float *value, int64_t k, const uint8_t *const *packet, int64_t packets, int bits, int64_t P, int bits_down, uint8_t *out) {
    const Divisor<double> divisor(P);
    with_bits(bits, [=](auto up) {
        with_bits(bits_down, [=](auto down) {
            constexpr int arrived = up, sent = down;
            const int64_t head = 2 * scales_of<arrived> * nblocks(k, value_block);
            uint8_t *scale = out, *stream = out + 2 * scales_of<sent> * nblocks(k, value_block);
            alignas(64) double total[value_block];
            alignas(64) float decoded[value_block], mean[value_block];
            for (int64_t i = 0; i < k; i += value_block, scale += 2 * scales_of<sent>, stream += value_block / 8 * sent) {
                const int64_t count = least(value_block, k - i);
                for (int64_t j = 0; j < count; ++j) total[j] = static_cast<double>(value[i + j]);
                for (int64_t source = 0; source < packets; ++source) {
                    const uint8_t *from = packet[source];
                    decode_block<arrived>(from + i / value_block * 2 * scales_of<arrived>, from + head + i / 8 * arrived, count,
                                          decoded);
                    for (int64_t j = 0; j < count; ++j) total[j] += divisor.by * static_cast<double>(decoded[j]);
                }
                for (int64_t j = 0; j < count; ++j) {
                    const double exact = divisor.exact ? total[j] * divisor.factor : total[j] / divisor.by;
                    const double low = exact < largest_float ? exact : static_cast<double>(largest_float);
                    const double both = low > -largest_float ? low : -static_cast<double>(largest_float);
                    // Finite sums become finite means; infinity and NaN stay.
                    mean[j] = static_cast<float>(exact - exact == 0.0 ? both : exact);
                }
                encode_block<sent>(mean, count, scale, stream);
                decode_block<sent>(scale, stream, count, decoded);
                for (int64_t j = 0; j < count; ++j)
                    value[i + j] = static_cast<float>(total[j] - divisor.by * static_cast<double>(decoded[j]));
            }
        });
    });
}

// The values of a packet to `out`; what stood there before goes to `kept`, unless that is null.
void decode_over(const uint8_t *packet, int64_t k, int bits, float *out, float *kept) {
    with_bits(bits, [=](auto width) {
        constexpr int each = width;
        const uint8_t *scale = packet, *stream = packet + 2 * scales_of<each> * nblocks(k, value_block);
        for (int64_t i = 0; i < k; i += value_block, scale += 2 * scales_of<each>, stream += value_block / 8 * each) {
            const int64_t count = least(value_block, k - i);
            if (kept) std::memcpy(kept + i, out + i, static_cast<size_t>(count) * sizeof *out);
            decode_block<each>(scale, stream, count, out + i);
        }
    });
}

}  // namespace
}  // namespace sparsync
