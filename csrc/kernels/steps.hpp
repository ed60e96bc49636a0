// The passes of exchanged steps, which read gradients and write weights where they lie. The specification is
// sparsync/kernels/step_reference.py.
#pragma once

#include <cstdint>
#include <vector>

#include "level.hpp"

namespace sparsync {

// What lies at [start, stop) of a vector. Parts ascend and do not overlap.
struct GradientPart {
    int64_t start, stop;
    const void *data;
    Type type;
    float factor;
};

struct TargetPart {
    int64_t start, stop;
    float *data;
};

struct AdamSpan {
    int64_t start, stop;
    AdamStep step;
    float unbiased;  // what second moments are to be divided by
};

struct MomentumSpan {
    int64_t start, stop;
    MomentumStep step;
    AdamStep made;  // with scales
    float unbiased;
};

// Of n elements, whose second moments have their mean of a block in each block; null: none.
struct Scales {
    float *square;
    const float *over;  // one over the mean, of each block
    int64_t block;
    float floor;
};

struct Gradients {
    std::vector<GradientPart> parts;
    float *square;
    const float *ratio;  // of each block
    int64_t block;
    std::vector<AdamSpan> spans;
};

// Writes the steps to `out`, inside of the spans.
void make_steps(const Level &level, const Gradients &gradients, float *out);

// Adds the steps to the residual [n], and encodes shares of all chunks but that of `rank`; spans cover everything.
void encode_steps(const Level &level, const Gradients &gradients, float *residual, int64_t n, int64_t rank, int64_t P, int bits, uint8_t *out);

// Writes residual + gradients to `sum`, which may be either, and does with it what `encode_steps` does; without parts `sum` is there.
void encode_sums(const Level &level, const std::vector<GradientPart> &parts, const float *residual, float *sum, int64_t n, int64_t rank,
                 int64_t P, int bits, uint8_t *out);

// The packets that `encode_steps` would write of nothing but NaN.
void encode_nan(const Level &level, int64_t n, int64_t rank, int64_t P, int bits, uint8_t *out);

void move_steps(const Level &level, const std::vector<TargetPart> &targets, float *momentum, const float *mean,
                const std::vector<MomentumSpan> &spans, const Scales *scales = nullptr);

// `move_steps` with what the packets of all chunks stand for.
void apply_steps(const Level &level, const std::vector<TargetPart> &targets, float *momentum, int64_t n,
                 const std::vector<const uint8_t *> &packets, int bits, const std::vector<MomentumSpan> &spans,
                 const Scales *scales = nullptr);

// Moves `error`, which may be `grad`, to the residual, unless that is null, and writes what the packets of all chunks stand for to `grad`.
void write_mean(const Level &level, float *grad, const float *error, float *residual, int64_t n, const std::vector<const uint8_t *> &packets,
                int bits);

// Whether `sketch` and `over_means` take blocks of this length.
bool is_sketched(int64_t block);

// The sum, with the signs of places and `key`, and the sum of squares of each block of n gradients.
void sketch(const Level &level, const std::vector<GradientPart> &parts, int64_t n, int64_t block, uint32_t key, float *sums, float *squares);

// One over the mean of each block of x, the last maybe shorter; means count as at least `least`.
void over_means(const Level &level, const float *x, int64_t n, int64_t block, float least, float *out);

// Chunk `number` of P adjacent ones of n elements, as `core.spans` cuts them.
struct Chunk {
    int64_t start, length;
    Chunk(int64_t n, int64_t P, int64_t number)
        : start(number * (n / P) + (number < n % P ? number : n % P)), length(n / P + (number < n % P)) {}
};

}  // namespace sparsync
