// Rounding in one pass with what a quantized all-reduce does around it: shares of a mean to their owners, sums and their mean back to all.
// The specification is sparsync/kernels/share_reference.py. A block stays in the first cache; whole vectors are read and written once.
#pragma once

#include <cstdint>
#include <cstring>

#include "values.hpp"

namespace sparsync {
namespace {

// The constant by which all numbers of a pass are divided: by a power of two they are multiplied, which rounds the same number.
template <class Number>
struct Divisor {
    Number by, factor;
    bool exact;
    explicit Divisor(int64_t P) : by(static_cast<Number>(P)), factor(1 / by), exact((P & (P - 1)) == 0) {}
};

// value -= times * received, which is computed in double where float32 does not hold the product.
SPARSYNC_INLINE void subtract(float *value, const float *received, int64_t count, float times) {
    uint32_t greatest = 0;
    for (int64_t j = 0; j < count; ++j) {
        const uint32_t magnitude = bits_of(value[j] - times * received[j]) & 0x7FFFFFFF;
        greatest = magnitude > greatest ? magnitude : greatest;
    }
    if (greatest < infinite_bits) {
        for (int64_t j = 0; j < count; ++j) value[j] = value[j] - times * received[j];
        return;
    }
    for (int64_t j = 0; j < count; ++j) {
        const float error = value[j] - times * received[j];
        const double wide = static_cast<double>(value[j]) - static_cast<double>(times) * static_cast<double>(received[j]);
        value[j] = (bits_of(error) & 0x7FFFFFFF) < infinite_bits ? error : static_cast<float>(wide);
    }
}

// The packet of value / P, and in the place of the values what P times the decoded packet lacks of them. The values are `count` of k,
// those from number `from` on, which begins a block; blocks must be encoded in their order.
void encode_share(float *value, int64_t from, int64_t count, int64_t k, int bits, int64_t P, uint8_t *out) {
    const Divisor<float> divisor(P);
    const Packet<uint8_t> packet{out, k, bits};
    alignas(64) float share[value_block], received[value_block];
    for (int64_t i = 0; i < count; i += value_block) {
        const int64_t some = least(value_block, count - i);
        if (divisor.exact)
            for (int64_t j = 0; j < some; ++j) share[j] = value[i + j] * divisor.factor;
        else
            for (int64_t j = 0; j < some; ++j) share[j] = value[i + j] / divisor.by;
        encode_some(packet, from + i, some, share, received);
        subtract(value + i, received, some, divisor.by);
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
        encode_some(packet, i, count, mean, decoded);
        for (int64_t j = 0; j < count; ++j)
            value[i + j] = static_cast<float>(total[j] - divisor.by * static_cast<double>(decoded[j]));
    }
}

// The values of a packet, as above, to `out`; what stood there before goes to `kept`, unless that is null.
void decode_over(const uint8_t *bytes, int64_t from, int64_t count, int64_t k, int bits, float *out, float *kept) {
    const Packet<const uint8_t> packet{bytes, k, bits};
    for (int64_t i = 0; i < count; i += value_block) {
        const int64_t some = least(value_block, count - i);
        if (kept) std::memcpy(kept + i, out + i, static_cast<size_t>(some) * sizeof *out);
        decode_some(packet, from + i, some, out + i);
    }
}

}  // namespace
}  // namespace sparsync
