// Whole packets of sparse vectors, positions and then values, as sparsync/wire.py specifies them, and what their rounding drops.
#pragma once

#include <cstdint>

#include "../codecs/codecs.hpp"

namespace sparsync {

// Of k elements of a span of `length`, 0 <= k <= length < 2^31: determined by these and the bits of a value alone.
struct PacketForm {
    int64_t k, length;
    int bits;            // of a value: 32, or one of `is_rounded`
    Positions codec;     // the one with the shortest packet; the first of equals
    int64_t head, nbytes;  // of the positions, which take none where all of them are there; of the whole
};

inline bool is_rounded(int64_t bits) {
    return bits == 8 || bits == 4 || bits == 3 || bits == 1 || bits == ternary;
}

inline bool are_value_bits(int64_t bits) { return bits == 32 || is_rounded(bits); }

PacketForm packet_form(const Codecs &codecs, int64_t k, int64_t length, int bits);

// False where positions do not ascend inside the span; `out` has room for `form.nbytes`.
bool encode_packet(const Codecs &codecs, const PacketForm &form, const int32_t *index, const float *value, uint8_t *out);

// False for bytes that are no packet of this form; `index` and `value` have room for k.
bool decode_packet(const Codecs &codecs, const PacketForm &form, const uint8_t *packet, int64_t nbytes, int32_t *index, float *value);

// The values alone, of a packet of `form.nbytes`.
void decode_packet_values(const Codecs &codecs, const PacketForm &form, const uint8_t *packet, float *value);

// error = value - times * received, where times > 1 also where the product is beyond the largest float.
void lacking(const float *value, const float *received, int64_t k, int64_t times, float *error);

// Whether each value, and `times` it, is finite.
bool finite_times(const float *value, int64_t k, float times);

}  // namespace sparsync
