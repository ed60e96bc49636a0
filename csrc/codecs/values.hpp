// Codecs that round values to few bits: pointers and lengths in, bytes out, nothing allocated. The specification is
// sparsync/kernels/value_reference.py: the same bytes, so no sum may be reordered and no multiplication fused with an addition.
#pragma once

#include <cstdint>
#include <cstring>

#include "bits.hpp"

namespace sparsync {
namespace {

constexpr int64_t value_block = 256;  // values that share a scale
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

// Formats of 1 and 2 bits have as many scales a block.
SPARSYNC_INLINE int64_t values_nbytes(int64_t k, int bits) {
    return 2 * (bits < 3 ? bits : 1) * nblocks(k, value_block) + nbytes_of(k, bits);
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

SPARSYNC_INLINE float floor_of(float x) {
    const float whole = static_cast<float>(static_cast<int32_t>(x));
    return whole > x ? whole - 1.0f : whole;
}

SPARSYNC_INLINE float clamped(float x, Codes codes) {
    const float below = x < codes.greatest ? x : codes.greatest;
    return below > codes.lowest ? below : codes.lowest;
}

// value / scale, rounded, among the codes; zero where the scale is zero or NaN.
SPARSYNC_INLINE void quantize(
    const float *value, const float *noise, int64_t count, uint32_t upper, Codes codes, int8_t *code) {
    if (upper == 0 || upper == nan_scale) {
        std::memset(code, 0, static_cast<size_t>(count));
        return;
    }
    const float scale = float_of(upper << 16);
    if (noise)
        for (int64_t i = 0; i < count; ++i) {
            const float x = floor_of(value[i] / scale + noise[i]);
            code[i] = static_cast<int8_t>(static_cast<int32_t>(clamped(x, codes)));
        }
    else
        for (int64_t i = 0; i < count; ++i) {
            const float x = nearest(value[i] / scale);
            code[i] = static_cast<int8_t>(static_cast<int32_t>(clamped(x, codes)));
        }
}

// The codes of a block of at most 256, one after the other, the first in the lowest bits.
SPARSYNC_INLINE void pack(const int8_t *code, int64_t count, int bits, uint8_t *out) {
    int64_t j = 0;
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

SPARSYNC_INLINE void unpack(const uint8_t *packed, int64_t count, int bits, int8_t *code) {
    int64_t j = 0;
    if (bits == 4)
        for (; j + 1 < count; j += 2, ++packed) {
            code[j] = static_cast<int8_t>(static_cast<int8_t>(*packed << 4) >> 4);
            code[j + 1] = static_cast<int8_t>(static_cast<int8_t>(*packed) >> 4);
        }
    if (bits == 3)
        for (; j + 7 < count; j += 8, packed += 3) {
            const uint32_t three = packed[0] | static_cast<uint32_t>(packed[1]) << 8 | static_cast<uint32_t>(packed[2]) << 16;
            for (int b = 0; b < 8; ++b) code[j + b] = static_cast<int8_t>(static_cast<int8_t>(three >> 3 * b << 5) >> 5);
        }
    uint32_t rest = 0;
    const int64_t left = count - j;
    for (int64_t b = 0; b < nbytes_of(left, bits); ++b) rest |= static_cast<uint32_t>(packed[b]) << 8 * b;
    for (int64_t b = 0; b < left; ++b)
        code[j + b] = static_cast<int8_t>(static_cast<int8_t>(rest >> bits * b << (8 - bits)) >> (8 - bits));
}

// The scale and the codes of a block of at most 256; `bits` is 8, 4 or 3, `noise` is null or holds a number for each value.
SPARSYNC_INLINE void scaled_encode_block(
    const float *value, int64_t count, int bits, const float *noise, uint8_t *scale, uint8_t *stream) {
    const float greatest = bits == 8 ? 127.0f : bits == 4 ? 7.0f : 3.0f;
    const Codes codes = {noise || bits != 3 ? -greatest : -greatest - 1.0f, greatest};
    alignas(32) int8_t code[value_block];
    const uint32_t upper = scale_of(value, count, codes);
    put_scale(scale, upper);
    quantize(value, noise, count, upper, codes, code);
    if (bits == 8)
        std::memcpy(stream, code, static_cast<size_t>(count));
    else
        pack(code, count, bits, stream);
}

// `bits` is 8, 4 or 3; `noise` is null or holds k numbers in [0, 1).
void scaled_encode(const float *value, int64_t k, int bits, const float *noise, uint8_t *out) {
    uint8_t *stream = out + 2 * nblocks(k, value_block);
    for (int64_t i = 0; i < k; i += value_block, out += 2)
        scaled_encode_block(value + i, least(value_block, k - i), bits, noise ? noise + i : nullptr, out, stream + i / 8 * bits);
}

// The packet has `values_nbytes(k, bits)` bytes.
void scaled_decode(const uint8_t *packet, int64_t k, int bits, float *out) {
    const uint8_t *stream = packet + 2 * nblocks(k, value_block);
    alignas(32) int8_t code[value_block];
    for (int64_t i = 0; i < k; i += value_block, packet += 2) {
        const int64_t count = least(value_block, k - i);
        const float scale = get_scale(packet);
        if (bits == 8)
            std::memcpy(code, stream + i, static_cast<size_t>(count));
        else
            unpack(stream + i / 8 * bits, count, bits, code);
        for (int64_t j = 0; j < count; ++j) out[i + j] = static_cast<float>(code[j]) * scale;
    }
}

// The mean of `count` of the 256 numbers, of which the others are zero. Halves are added to each other, so the order is fixed.
SPARSYNC_INLINE float mean_of(double *number, int64_t count) {
    for (int64_t half = value_block / 2; half; half /= 2)
        for (int64_t i = 0; i < half; ++i) number[i] += number[i + half];
    return static_cast<float>(number[0] / static_cast<double>(count));
}

// The upper half, rounded to nearest.
SPARSYNC_INLINE uint32_t mean_scale(float mean) {
    const uint32_t bits = bits_of(mean);
    if ((bits & 0x7FFFFFFF) >= infinite_bits) return nan_scale;
    const uint32_t upper = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return upper < max_scale ? upper : max_scale;
}

// Codes of 1 or 2 bits, one after the other, the first in the lowest; those behind the last are zero up to a whole byte.
SPARSYNC_INLINE void pack_means(const uint8_t *code, int64_t count, int bits, uint8_t *out) {
    int64_t j = 0;
#ifdef __AVX2__
    for (; j + 8 <= count; j += 8, out += bits) {
        uint64_t eight;
        std::memcpy(&eight, code + j, sizeof eight);
        const auto packed = static_cast<uint32_t>(_pext_u64(eight, bits == 1 ? 0x0101010101010101 : 0x0303030303030303));
        std::memcpy(out, &packed, static_cast<size_t>(bits));
    }
#endif
    const int64_t per_byte = 8 / bits;
    for (; j < count; j += per_byte) {
        uint32_t byte = 0;
        for (int64_t b = 0; b < per_byte; ++b) byte |= static_cast<uint32_t>(code[j + b]) << bits * b;
        *out++ = static_cast<uint8_t>(byte);
    }
}

// The means and the codes of a block of at most 256. `bits` is 1: the sign, and the mean magnitude; or 2: also whether the magnitude is
// above that mean, and the means of the magnitudes that are not and of those that are.
SPARSYNC_INLINE void means_encode_block(const float *value, int64_t count, int bits, uint8_t *scale, uint8_t *stream) {
    float magnitude[value_block] = {};
    double number[value_block];
    uint8_t code[value_block] = {};
    for (int64_t j = 0; j < count; ++j) {
        magnitude[j] = float_of(bits_of(value[j]) & 0x7FFFFFFF);
        code[j] = static_cast<uint8_t>(bits_of(value[j]) >> 31);
    }
    for (int64_t j = 0; j < value_block; ++j) number[j] = static_cast<double>(magnitude[j]);
    const float mean = mean_of(number, count);
    if (bits == 1)
        put_scale(scale, mean_scale(mean));
    else {
        int64_t above = 0;
        double larger[value_block];
        for (int64_t j = 0; j < value_block; ++j) {
            const bool is = magnitude[j] > mean;
            above += is;
            code[j] = static_cast<uint8_t>(code[j] | is << 1);
            number[j] = is ? 0.0 : static_cast<double>(magnitude[j]);
            larger[j] = is ? static_cast<double>(magnitude[j]) : 0.0;
        }
        put_scale(scale, mean_scale(mean_of(number, count - above)));
        put_scale(scale + 2, mean_scale(mean_of(larger, above ? above : 1)));
    }
    pack_means(code, count, bits, stream);
}

void means_encode(const float *value, int64_t k, int bits, uint8_t *out) {
    uint8_t *stream = out + 2 * bits * nblocks(k, value_block);
    for (int64_t i = 0; i < k; i += value_block, out += 2 * bits)
        means_encode_block(value + i, least(value_block, k - i), bits, out, stream + i / 8 * bits);
}

void means_decode(const uint8_t *packet, int64_t k, int bits, float *out) {
    const uint8_t *stream = packet + 2 * bits * nblocks(k, value_block);
    const int64_t per_byte = 8 / bits;
    for (int64_t i = 0; i < k; i += value_block, packet += 2 * bits) {
        const int64_t count = least(value_block, k - i);
        const uint32_t low = bits_of(get_scale(packet)), high = bits == 2 ? bits_of(get_scale(packet + 2)) : low;
        const uint32_t difference = low ^ high;
        for (int64_t j = 0; j < count; j += per_byte) {
            const uint32_t byte = stream[(i + j) / per_byte];
            const int64_t some = least(per_byte, count - j);
            for (int64_t b = 0; b < some; ++b) {
                const uint32_t code = byte >> bits * b;
                const uint32_t above = bits == 2 ? 0u - (code >> 1 & 1) : 0u;
                out[i + j + b] = float_of((low ^ (difference & above)) ^ (code & 1) << 31);
            }
        }
    }
}

}  // namespace
}  // namespace sparsync
