// The codecs of positions and values as one table for each instruction set; positions.hpp, values.hpp and shares.hpp say what each entry does.
#pragma once

#include <cstdint>

namespace sparsync {

enum class Positions { packed, bitmap, elias_fano };
enum Reason : int { fine = 0, wrong_size = 1, wrong_count = 2, wrong_order = 3, outside = 4 };  // what is wrong with input
constexpr int ternary = -5;  // in the place of the bits of a value: five values a byte

struct Codecs {
    // The bytes of a packet of any k positions inside [0, span), for 0 <= k <= span < 2^31.
    int64_t (*nbytes)(Positions codec, int64_t k, int64_t span);
    // `out` has room for that many. Positions that do not ascend inside the span are refused.
    Reason (*encode)(Positions codec, const int32_t *index, int64_t k, int64_t span, uint8_t *out);
    // Any bytes; `out` has room for k positions.
    Reason (*decode)(Positions codec, const uint8_t *packet, int64_t nbytes, int64_t k, int64_t span, int32_t *out);
    // The bytes of k values of `bits` bits: 8, 4, 3, 1 or `ternary`.
    int64_t (*values_nbytes)(int64_t k, int bits);
    void (*encode_values)(const float *value, int64_t k, int bits, uint8_t *out);
    // shares.hpp says what these do.
    void (*encode_share)(float *value, int64_t from, int64_t count, int64_t k, int bits, int64_t P, uint8_t *out);
    void (*reduce_shares)(float *value, int64_t k, const uint8_t *const *packets, int64_t sources, int bits, int64_t P,
                          int bits_down, uint8_t *out);
    void (*decode_over)(const uint8_t *packet, int64_t from, int64_t count, int64_t k, int bits, float *out, float *kept);
};

// Null where this build or this processor lacks the instructions.
const Codecs *codecs_scalar();
const Codecs *codecs_avx2();
const Codecs *codecs_avx512();

}  // namespace sparsync
