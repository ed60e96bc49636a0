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

SPARSYNC_INLINE int64_t scaled_nbytes(int64_t k, int bits) { return 2 * nblocks(k, value_block) + nbytes_of(k, bits); }

// The upper half of the least float32 that times `max_code` reaches the greatest magnitude, as far as it is finite.
SPARSYNC_INLINE uint32_t scale_of(const float *value, int64_t count, float max_code) {
    uint32_t greatest = 0;
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t magnitude = bits_of(value[i]) & 0x7FFFFFFF;
        greatest = magnitude > greatest ? magnitude : greatest;
    }
    if (greatest >= infinite_bits) return nan_scale;
    const uint32_t ceiling = bits_of(3.40282346638528859812e+38f / max_code) >> 16;
    const uint32_t upper = (bits_of(float_of(greatest) / max_code) + 0xFFFF) >> 16;
    return upper < ceiling ? upper : ceiling;
}

SPARSYNC_INLINE float nearest(float x) {  // ties to even, for |x| < 2^22; adding moves the fraction out of the significand
    return (x + 12582912.0f) - 12582912.0f;
}

SPARSYNC_INLINE float floor_of(float x) {
    const float whole = static_cast<float>(static_cast<int32_t>(x));
    return whole > x ? whole - 1.0f : whole;
}

SPARSYNC_INLINE float clamped(float x, float limit) {
    const float below = x < limit ? x : limit;
    return below > -limit ? below : -limit;
}

// value / scale, rounded, in [-max_code, max_code]; zero where the scale is zero or NaN.
SPARSYNC_INLINE void quantize(
    const float *value, const float *noise, int64_t count, uint32_t upper, float max_code, int8_t *code) {
    if (upper == 0 || upper == nan_scale) {
        std::memset(code, 0, static_cast<size_t>(count));
        return;
    }
    const float scale = float_of(upper << 16);
    if (noise)
        for (int64_t i = 0; i < count; ++i) {
            const float x = floor_of(value[i] / scale + noise[i]);
            code[i] = static_cast<int8_t>(static_cast<int32_t>(clamped(x, max_code)));
        }
    else
        for (int64_t i = 0; i < count; ++i) {
            const float x = nearest(value[i] / scale);
            code[i] = static_cast<int8_t>(static_cast<int32_t>(clamped(x, max_code)));
        }
}

// `bits` is 8 or 4; `noise` is null or holds k numbers in [0, 1).
void scaled_encode(const float *value, int64_t k, int bits, const float *noise, uint8_t *out) {
    const float max_code = bits == 8 ? 127.0f : 7.0f;
    uint8_t *stream = out + 2 * nblocks(k, value_block);
    alignas(32) int8_t code[value_block];
    for (int64_t i = 0; i < k; i += value_block, out += 2) {
        const int64_t count = least(value_block, k - i);
        const uint32_t scale = scale_of(value + i, count, max_code);
        put_scale(out, scale);
        quantize(value + i, noise ? noise + i : nullptr, count, scale, max_code, code);
        if (bits == 8) {
            std::memcpy(stream + i, code, static_cast<size_t>(count));
            continue;
        }
        if (count % 2) code[count] = 0;
        for (int64_t j = 0; j < count; j += 2)
            stream[(i + j) / 2] = static_cast<uint8_t>((code[j] & 15) | (code[j + 1] & 15) << 4);
    }
}

// The packet has `scaled_nbytes(k, bits)` bytes.
void scaled_decode(const uint8_t *packet, int64_t k, int bits, float *out) {
    const uint8_t *stream = packet + 2 * nblocks(k, value_block);
    for (int64_t i = 0; i < k; i += value_block, packet += 2) {
        const int64_t count = least(value_block, k - i);
        const float scale = get_scale(packet);
        if (bits == 8) {
            for (int64_t j = 0; j < count; ++j) out[i + j] = static_cast<float>(static_cast<int8_t>(stream[i + j])) * scale;
            continue;
        }
        const uint8_t *pairs = stream + i / 2;
        for (int64_t j = 0; j + 1 < count; j += 2) {
            out[i + j] = static_cast<float>(static_cast<int8_t>(pairs[j / 2] << 4) >> 4) * scale;
            out[i + j + 1] = static_cast<float>(static_cast<int8_t>(pairs[j / 2]) >> 4) * scale;
        }
        if (count % 2) out[i + count - 1] = static_cast<float>(static_cast<int8_t>(pairs[count / 2] << 4) >> 4) * scale;
    }
}

// The upper half of the mean magnitude, rounded to nearest. Halves are added to each other, so the order is fixed.
SPARSYNC_INLINE uint32_t mean_scale(const float *value, int64_t count) {
    double sum[value_block] = {};
    for (int64_t i = 0; i < count; ++i) sum[i] = static_cast<double>(float_of(bits_of(value[i]) & 0x7FFFFFFF));
    for (int64_t half = value_block / 2; half; half /= 2)
        for (int64_t i = 0; i < half; ++i) sum[i] += sum[i + half];
    const uint32_t bits = bits_of(static_cast<float>(sum[0] / static_cast<double>(count)));
    if (bits >= infinite_bits) return nan_scale;
    const uint32_t upper = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return upper < max_scale ? upper : max_scale;
}

void sign_encode(const float *value, int64_t k, uint8_t *out) {
    uint8_t *stream = out + 2 * nblocks(k, value_block);
    for (int64_t i = 0; i < k; i += value_block, out += 2) {
        const int64_t count = least(value_block, k - i);
        put_scale(out, mean_scale(value + i, count));
        for (int64_t j = 0; j < count; j += 8) {
            uint32_t byte = 0;
            for (int64_t b = 0; b < least(8, count - j); ++b) byte |= bits_of(value[i + j + b]) >> 31 << b;
            stream[(i + j) / 8] = static_cast<uint8_t>(byte);
        }
    }
}

void sign_decode(const uint8_t *packet, int64_t k, float *out) {
    const uint8_t *stream = packet + 2 * nblocks(k, value_block);
    for (int64_t i = 0; i < k; i += value_block, packet += 2) {
        const int64_t count = least(value_block, k - i);
        const uint32_t scale = bits_of(get_scale(packet));
        for (int64_t j = 0; j < count; j += 8) {
            const uint32_t byte = stream[(i + j) / 8];
            const int64_t some = least(8, count - j);
            for (int64_t b = 0; b < some; ++b) out[i + j + b] = float_of(scale ^ (byte >> b & 1) << 31);
        }
    }
}

}  // namespace
}  // namespace sparsync
