// Codecs that round values to few bits: pointers and lengths in, bytes out, nothing allocated. The specification is
// sparsync/kernels/value_reference.py: the same bytes, so no sum may be reordered and no multiplication fused with an addition.
#pragma once

#include <cstdint>
#include <cstring>

#include "bits.hpp"
#include "codecs.hpp"

namespace sparsync {
namespace {

constexpr int64_t value_block = 256;  // values that share a scale
constexpr int64_t scale_nbytes = 2;   // of a block
constexpr int64_t trits = 5;          // ternary codes in a byte
constexpr uint32_t nan_scale = 0x7FC0, infinite_bits = 0x7F800000, max_scale = 0x7F7F;

SPARSYNC_INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

SPARSYNC_INLINE float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

SPARSYNC_INLINE void put_scale(uint8_t *out, uint32_t scale) {
    out[0] = static_cast<uint8_t>(scale);
    out[1] = static_cast<uint8_t>(scale >> 8);
}

SPARSYNC_INLINE float get_scale(const uint8_t *packet) {
    return float_of((static_cast<uint32_t>(packet[1]) << 8 | packet[0]) << 16);
}

SPARSYNC_INLINE int64_t values_nbytes(int64_t k, int bits) {
    return scale_nbytes * nblocks(k, value_block) + (bits == ternary ? nblocks(k, trits) : nbytes_of(k, bits));
}

// Codes of a format, from `lowest` to `greatest`.
struct Codes {
    float lowest, greatest;
};

// The upper half of the least float32 that times -lowest reaches the greatest magnitude, as far as it is finite. Where there are more codes
// below zero than above, it is negative if the greatest magnitude is that of positive values alone.
SPARSYNC_INLINE uint32_t scale_of(const float *value, int64_t count, Codes codes) {
    int32_t highest = 0;   // bits of the greatest positive value, or 0
    uint32_t deepest = 0;  // those of the negative value of greatest magnitude, if there is one: all negative ones are above all others
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t bits = bits_of(value[i]);
        const int32_t with_sign = static_cast<int32_t>(bits);
        highest = with_sign > highest ? with_sign : highest;
        deepest = bits > deepest ? bits : deepest;
    }
    const uint32_t above = static_cast<uint32_t>(highest), below = deepest >> 31 ? deepest & 0x7FFFFFFF : 0;
    const uint32_t greatest = above > below ? above : below;
    if (greatest >= infinite_bits) return nan_scale;
    const uint32_t ceiling = bits_of(3.40282346638528859812e+38f / -codes.lowest) >> 16;
    const uint32_t upper = (bits_of(float_of(greatest) / -codes.lowest) + 0xFFFF) >> 16;
    const uint32_t scale = upper < ceiling ? upper : ceiling;
    return codes.greatest < -codes.lowest && above > below && scale ? scale | 0x8000 : scale;
}

SPARSYNC_INLINE float nearest(float x) {  // ties to even, for |x| < 2^22; adding moves the fraction out of the significand
    return (x + 12582912.0f) - 12582912.0f;
}

SPARSYNC_INLINE float clamped(float x, Codes codes) {
    const float below = x < codes.greatest ? x : codes.greatest;
    return below > codes.lowest ? below : codes.lowest;
}

// The part of `quantize`, `pack` and `decode_block` that is done for 32 values at once; each returns how many it has done.
#ifdef __AVX2__
constexpr int64_t many = 32;

SPARSYNC_INLINE __m256i quantized(const float *value, __m256 high, __m256 low) {
    const __m256 x = _mm256_loadu_ps(value);
    return _mm256_cvtps_epi32(_mm256_fmadd_ps(x, high, _mm256_mul_ps(x, low)));
}

// By a multiplication with 1 / scale in two floats, whose product is within 2^-47 of the quotient before it is rounded. That rounds to the
// same code: a scale has a significand of 8 bits, so the middle between two codes, times the scale, is a float32, whose quotient is that
// middle, and the quotients of all other float32 are farther from it than a half and 2^-9 of the distance of float32 there.
SPARSYNC_INLINE int64_t quantize_many(const float *value, int64_t count, float scale, Codes codes, int8_t *code) {
    const uint32_t exponent = bits_of(scale) >> 23 & 0xFF;
    if (exponent < 27 || exponent > 217) return 0;  // from 2^-100 to 2^90 both floats are normal numbers
    const double inverse = 1.0 / static_cast<double>(scale);
    const auto first = static_cast<float>(inverse);
    const __m256 high = _mm256_set1_ps(first), low = _mm256_set1_ps(static_cast<float>(inverse - static_cast<double>(first)));
    const __m256i lowest = _mm256_set1_epi8(static_cast<char>(codes.lowest)), greatest = _mm256_set1_epi8(static_cast<char>(codes.greatest));
    const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    int64_t i = 0;
    for (; i + many <= count; i += many) {
        const __m256i one = _mm256_packs_epi32(quantized(value + i, high, low), quantized(value + i + 8, high, low));
        const __m256i other = _mm256_packs_epi32(quantized(value + i + 16, high, low), quantized(value + i + 24, high, low));
        const __m256i all = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(one, other), in_order);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(code + i), _mm256_max_epi8(_mm256_min_epi8(all, greatest), lowest));
    }
    return i;
}

SPARSYNC_INLINE int64_t pack_many(const int8_t *code, int64_t count, int bits, uint8_t *out) {
    if (bits != 3 && bits != 4) return 0;
    const __m256i mask = _mm256_set1_epi8(static_cast<char>((1 << bits) - 1));
    const __m256i pairs = _mm256_set1_epi16(static_cast<int16_t>(1 << (8 + bits) | 1)), quads = _mm256_set1_epi32(1 << (16 + 2 * bits) | 1);
    const __m256i low = _mm256_set1_epi64x((int64_t{1} << 4 * bits) - 1);
    const __m128i to_quad = _mm_cvtsi32_si128(32 - 4 * bits);
    const __m256i whole = bits == 3 ? _mm256_setr_epi8(0, 1, 2, 8, 9, 10, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 1, 2, 8, 9, 10, -1, -1,
                                                       -1, -1, -1, -1, -1, -1, -1, -1)
                                    : _mm256_setr_epi8(0, 1, 2, 3, 8, 9, 10, 11, -1, -1, -1, -1, -1, -1, -1, -1, 0, 1, 2, 3, 8, 9, 10, 11,
                                                       -1, -1, -1, -1, -1, -1, -1, -1);
    int64_t i = 0;
    for (; i + many <= count; i += many, out += 4 * bits) {
        const __m256i each = _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(code + i)), mask);
        const __m256i four = _mm256_madd_epi16(_mm256_maddubs_epi16(each, pairs), quads);
        const __m256i eight = _mm256_or_si256(_mm256_and_si256(four, low), _mm256_andnot_si256(low, _mm256_srl_epi64(four, to_quad)));
        const __m256i bytes = _mm256_shuffle_epi8(eight, whole);
        const auto first = static_cast<uint64_t>(_mm_cvtsi128_si64(_mm256_castsi256_si128(bytes)));
        const auto second = static_cast<uint64_t>(_mm_cvtsi128_si64(_mm256_extracti128_si256(bytes, 1)));
        if (bits == 4) {
            std::memcpy(out, &first, sizeof first);
            std::memcpy(out + 8, &second, sizeof second);
        } else {
            const uint64_t start = first | second << 48;
            const auto end = static_cast<uint32_t>(second >> 16);
            std::memcpy(out, &start, sizeof start);
            std::memcpy(out + 8, &end, sizeof end);
        }
    }
    return i;
}

// Of 3 bits.
SPARSYNC_INLINE int64_t decode_many(const uint8_t *stream, int64_t count, float scale, float *out) {
    const __m256 size = _mm256_set1_ps(scale);
    const __m256i shift = _mm256_setr_epi32(29, 26, 23, 20, 17, 14, 11, 8);
    const __m256i bytes = _mm256_setr_epi8(0, 1, 2, -1, 0, 1, 2, -1, 0, 1, 2, -1, 0, 1, 2, -1, 0, 1, 2, -1, 0, 1, 2, -1, 0, 1, 2, -1, 0, 1, 2, -1);
    int64_t i = 0;
    for (; i + many <= count; i += many, stream += 12) {
        uint64_t start;
        uint32_t end;
        std::memcpy(&start, stream, sizeof start);
        std::memcpy(&end, stream + 8, sizeof end);
        const __m128i twelve = _mm_insert_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(start)), static_cast<int32_t>(end), 2);
        const __m256i both = _mm256_broadcastsi128_si256(twelve);
#pragma GCC unroll 4
        for (int octet = 0; octet < 4; ++octet) {
            // The fourth byte of each word is none of these: it stays zero.
            const __m256i word = _mm256_shuffle_epi8(both, _mm256_add_epi8(bytes, _mm256_set1_epi32(0x00010101 * 3 * octet)));
            const __m256i code = _mm256_srai_epi32(_mm256_sllv_epi32(word, shift), 29);
            _mm256_storeu_ps(out + i + 8 * octet, _mm256_mul_ps(_mm256_cvtepi32_ps(code), size));
        }
    }
    return i;
}
#else
SPARSYNC_INLINE int64_t quantize_many(const float *, int64_t, float, Codes, int8_t *) { return 0; }
SPARSYNC_INLINE int64_t pack_many(const int8_t *, int64_t, int, uint8_t *) { return 0; }
SPARSYNC_INLINE int64_t decode_many(const uint8_t *, int64_t, float, float *) { return 0; }
#endif

// value / scale, rounded, among the codes; zero where the scale is zero or NaN.
SPARSYNC_INLINE void quantize(const float *value, int64_t count, uint32_t upper, Codes codes, int8_t *code) {
    if (upper == 0 || upper == nan_scale) {
        std::memset(code, 0, static_cast<size_t>(count));
        return;
    }
    const float scale = float_of(upper << 16);
    int64_t i = quantize_many(value, count, scale, codes, code);
    for (; i < count; ++i)
        code[i] = static_cast<int8_t>(static_cast<int32_t>(clamped(nearest(value[i] / scale), codes)));
}

// The codes of a block of at most 256, one after the other, the first in the lowest bits.
SPARSYNC_INLINE void pack(const int8_t *code, int64_t count, int bits, uint8_t *out) {
    int64_t j = pack_many(code, count, bits, out);
    out += j / 8 * bits;
    if (bits == 4)
        for (; j + 1 < count; j += 2) *out++ = static_cast<uint8_t>((code[j] & 15) | (code[j + 1] & 15) << 4);
    if (bits == 3)
        for (; j + 7 < count; j += 8, out += 3) {
            uint32_t three = 0;
            for (int b = 0; b < 8; ++b) three |= static_cast<uint32_t>(code[j + b] & 7) << 3 * b;
            for (int b = 0; b < 3; ++b) out[b] = static_cast<uint8_t>(three >> 8 * b);
        }
    uint32_t rest = 0;
    const int64_t left = count - j;
    for (int64_t b = 0; b < left; ++b) rest |= static_cast<uint32_t>(code[j + b] & ((1 << bits) - 1)) << bits * b;
    for (int64_t b = 0; b < nbytes_of(left, bits); ++b) out[b] = static_cast<uint8_t>(rest >> 8 * b);
}

// The scale and the codes of a block of at most 256; `bits` is 8, 4 or 3. And what they are decoded to, unless that is null.
template <int bits>
SPARSYNC_INLINE void scaled_encode_block(const float *value, int64_t count, uint8_t *scale, uint8_t *stream, float *decoded) {
    constexpr float greatest = bits == 8 ? 127.0f : bits == 4 ? 7.0f : 3.0f;
    constexpr Codes codes = {bits == 3 ? -greatest - 1.0f : -greatest, greatest};
    alignas(32) int8_t code[value_block];
    const uint32_t upper = scale_of(value, count, codes);
    put_scale(scale, upper);
    quantize(value, count, upper, codes, code);
    if (bits == 8)
        std::memcpy(stream, code, static_cast<size_t>(count));
    else
        pack(code, count, bits, stream);
    const float size = float_of(upper << 16);
    if (decoded)
        for (int64_t j = 0; j < count; ++j) decoded[j] = static_cast<float>(code[j]) * size;
}

// The mean of `count` of the 256 numbers, of which the others are zero. Halves are added to each other, so the order is fixed.
SPARSYNC_INLINE double mean_of(double *number, int64_t count) {
    for (int64_t half = value_block / 2; half; half /= 2)
        for (int64_t i = 0; i < half; ++i) number[i] += number[i + half];
    return number[0] / static_cast<double>(count);
}

// The upper half, rounded to nearest; of a finite number it is finite.
SPARSYNC_INLINE uint32_t mean_scale(double mean) {
    if (mean - mean != 0.0) return nan_scale;
    const uint32_t bits = bits_of(static_cast<float>(mean));
    const uint32_t upper = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return upper < max_scale ? upper : max_scale;
}

// The mean magnitude and the signs of a block of at most 256, the first in the lowest bit; those behind the last are zero.
SPARSYNC_INLINE void signs_encode_block(const float *value, int64_t count, uint8_t *scale, uint8_t *stream) {
    double number[value_block] = {};
    for (int64_t j = 0; j < count; ++j) number[j] = static_cast<double>(float_of(bits_of(value[j]) & 0x7FFFFFFF));
    put_scale(scale, mean_scale(mean_of(number, count)));
    int64_t j = 0;
#ifdef __AVX2__
    for (; j + 8 <= count; j += 8) *stream++ = static_cast<uint8_t>(_mm256_movemask_ps(_mm256_loadu_ps(value + j)));
#endif
    for (; j < count; j += 8) {
        uint32_t byte = 0;
        for (int64_t b = 0; b < 8 && j + b < count; ++b) byte |= bits_of(value[j + b]) >> 31 << b;
        *stream++ = static_cast<uint8_t>(byte);
    }
}

// The scale, 1.224 root mean squares, and a code for each value: 1 above half the scale, 2 below minus half of it, else 0. Five are a byte,
// the first as ones, the next as threes. The first byte already has `first` codes of the block before.
SPARSYNC_INLINE void ternary_encode_block(const float *value, int64_t count, int64_t first, uint8_t *scale, uint8_t *stream) {
    double number[value_block] = {};
    uint8_t trit[value_block + 2 * trits] = {};
    for (int64_t j = 0; j < count; ++j) number[j] = static_cast<double>(value[j]) * static_cast<double>(value[j]);
    const uint32_t upper = mean_scale(__builtin_sqrt(mean_of(number, count)) * 1.224);
    put_scale(scale, upper);
    const float half = float_of(upper << 16) / 2;
    for (int64_t j = 0; j < count; ++j) trit[first + j] = static_cast<uint8_t>((value[j] > half) + 2 * (value[j] < -half));
    uint32_t before = first ? stream[0] : 0;
    for (int64_t j = 0; j < first + count; j += trits, before = 0) {
        uint64_t five;
        std::memcpy(&five, trit + j, sizeof five);
        // Byte 4 of the product is the sum of each code times its power of three; no byte below carries into it.
        *stream++ = static_cast<uint8_t>(before + (five * 0x0103091B51 >> 32));
    }
}

// The five codes of each byte, a byte for each: 0, 1 or -1.
struct Fives {
    uint64_t of[256];
    constexpr Fives() : of() {
        for (uint32_t byte = 0; byte < 256; ++byte)
            for (uint32_t place = 0, rest = byte; place < trits; ++place, rest /= 3)
                of[byte] |= static_cast<uint64_t>(rest % 3 == 2 ? 0xFF : rest % 3) << 8 * place;
    }
};
constexpr Fives fives;

SPARSYNC_INLINE void ternary_decode_block(const uint8_t *scale, const uint8_t *stream, int64_t first, int64_t count, float *out) {
    int8_t code[value_block + 2 * trits];
    for (int64_t j = 0; j < first + count; j += trits) std::memcpy(code + j, &fives.of[*stream++], sizeof fives.of[0]);
    const float level = get_scale(scale);
    for (int64_t j = 0; j < count; ++j) out[j] = static_cast<float>(code[first + j]) * level;
}

// Eight values of a block out of the `bits` bytes of their codes.
#ifdef __AVX2__
template <int bits>
SPARSYNC_INLINE __m256i shifts_to(int top) {  // that bring each code to the bits below `top`
    return _mm256_sub_epi32(_mm256_set1_epi32(top), _mm256_mullo_epi32(_mm256_set1_epi32(bits), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)));
}

template <int bits>
SPARSYNC_INLINE void decode_octet(float scale, uint32_t word, float *out) {
    const __m256i words = _mm256_set1_epi32(static_cast<int32_t>(word));
    const __m256 size = _mm256_set1_ps(scale);
    if constexpr (bits > 1) {
        const __m256i code = _mm256_srai_epi32(_mm256_sllv_epi32(words, shifts_to<bits>(32 - bits)), 32 - bits);
        _mm256_storeu_ps(out, _mm256_mul_ps(_mm256_cvtepi32_ps(code), size));
    } else {
        const __m256i negative = _mm256_slli_epi32(_mm256_srlv_epi32(words, shifts_to<-1>(0)), 31);
        _mm256_storeu_ps(out, _mm256_xor_ps(size, _mm256_castsi256_ps(negative)));
    }
}
#else
template <int bits>
SPARSYNC_INLINE void decode_octet(float scale, uint32_t word, float *out) {
    for (int b = 0; b < 8; ++b)
        if constexpr (bits > 1)
            out[b] = static_cast<float>(static_cast<int32_t>(word << (32 - bits - bits * b)) >> (32 - bits)) * scale;
        else
            out[b] = float_of(bits_of(scale) ^ word >> b << 31);
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

// The values of a block of at most 256, of which `scale` points at the scale in the packet.
template <int bits>
SPARSYNC_INLINE void decode_block(const uint8_t *scale, const uint8_t *stream, int64_t count, float *out) {
    const float size = get_scale(scale);
    int64_t j = 0;
    if constexpr (bits == 8) {
        for (; j < count; ++j) out[j] = static_cast<float>(static_cast<int8_t>(stream[j])) * size;
    } else {
        if constexpr (bits == 3) {
            j = decode_many(stream, count, size, out);
            stream += j / 8 * bits;
        }
        for (; j + 8 <= count; j += 8, stream += bits) {
            decode_octet<bits>(size, word_of<bits>(stream), out + j);
        }
        if (j < count) {
            uint32_t word = 0;
            float eight[8];
            std::memcpy(&word, stream, static_cast<size_t>(nbytes_of(count - j, bits)));
            decode_octet<bits>(size, word, eight);
            std::memcpy(out + j, eight, static_cast<size_t>(count - j) * sizeof *out);
        }
    }
}

// Where the scales and the codes of the block are that begins with element `i` of `k`.
template <class Byte>
struct Packet {
    Byte *bytes;
    int64_t k;
    int bits;
    Byte *scale(int64_t i) const { return bytes + i / value_block * scale_nbytes; }
    Byte *stream(int64_t i) const {
        return bytes + nblocks(k, value_block) * scale_nbytes + (bits == ternary ? i / trits : i / 8 * bits);
    }
};

// For any number of bits: what a block costs is not noticed, and one copy of each format is compiled.
void decode_some(const Packet<const uint8_t> &packet, int64_t i, int64_t count, float *out) {
    const uint8_t *scale = packet.scale(i), *stream = packet.stream(i);
    if (packet.bits == 8) decode_block<8>(scale, stream, count, out);
    if (packet.bits == 4) decode_block<4>(scale, stream, count, out);
    if (packet.bits == 3) decode_block<3>(scale, stream, count, out);
    if (packet.bits == 1) decode_block<1>(scale, stream, count, out);
    if (packet.bits == ternary) ternary_decode_block(scale, stream, i % trits, count, out);
}

// Blocks must be encoded in their order. What they are decoded to goes to `decoded`, unless that is null.
void encode_some(const Packet<uint8_t> &packet, int64_t i, int64_t count, const float *value, float *decoded) {
    uint8_t *scale = packet.scale(i), *stream = packet.stream(i);
    if (packet.bits == 8) scaled_encode_block<8>(value, count, scale, stream, decoded);
    if (packet.bits == 4) scaled_encode_block<4>(value, count, scale, stream, decoded);
    if (packet.bits == 3) scaled_encode_block<3>(value, count, scale, stream, decoded);
    if (packet.bits == 1) signs_encode_block(value, count, scale, stream);
    if (packet.bits == ternary) ternary_encode_block(value, count, i % trits, scale, stream);
    if (decoded && packet.bits <= 1) decode_some({packet.bytes, packet.k, packet.bits}, i, count, decoded);
}

// The packet of k values.
void encode_values(const float *value, int64_t k, int bits, uint8_t *out) {
    for (int64_t i = 0; i < k; i += value_block) encode_some({out, k, bits}, i, least(value_block, k - i), value + i, nullptr);
}

}  // namespace
}  // namespace sparsync
