// Kernels whose work is in proportion to the selected elements.
#pragma once

#include <cstdint>
#include <vector>

namespace sparsync {

// out[index[i]] += value[i], in order. False, and nothing done, where a position is not in [0, n).
template <class Index>
bool scatter_add(float *out, int64_t n, const Index *index, const float *value, int64_t k);

// out[index[i]] = 0. False, and nothing done, where a position is not in [0, n).
template <class Index>
bool clear(float *out, int64_t n, const Index *index, int64_t k);

// out[index[i]] = value[i], in order. False, and nothing done, where a position is not in [0, n).
template <class Index>
bool put(float *out, int64_t n, const Index *index, const float *value, int64_t k);

// value[i] = x[index[i]]. False, and nothing done, where a position is not in [0, n).
template <class Index>
bool gather(const float *x, int64_t n, const Index *index, float *value, int64_t k);

struct SparseView {
    const int32_t *index;
    const float *value;
    int64_t count;
};

// All elements of `parts`, positions ascending; of equal positions the earlier part's first. The arrays hold all of them.
void merge(const std::vector<SparseView> &parts, int32_t *index, float *value);

// Elements of equal position, which are neighbours, become one: 0 plus their values in order. How many are left.
int64_t add_equal(int32_t *index, float *value, int64_t count);

// Where each of the ascending `stops` cuts the ascending `index`: how many are below it.
void split(const int32_t *index, int64_t k, const int32_t *stops, int64_t count, int64_t *ends);

// Whether each of `index` is one of the ascending `others`; fast where `index` ascends, too.
void isin(const int32_t *index, int64_t k, const int32_t *others, int64_t count, bool *found);

}  // namespace sparsync
