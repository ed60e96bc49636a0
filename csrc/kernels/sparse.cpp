#include "sparse.hpp"

#include <algorithm>
#include <cstring>

namespace sparsync {

namespace {

template <class Index>
bool inside(const Index *index, int64_t k, int64_t n) {
    bool all = true;
    for (int64_t i = 0; i < k; ++i) all &= static_cast<uint64_t>(index[i]) < static_cast<uint64_t>(n);
    return all;
}

void merge_two(SparseView a, SparseView b, int32_t *index, float *value) {
    int64_t i = 0, j = 0, out = 0;
    if (a.count && b.count && a.index[a.count - 1] > b.index[0]) {
        while (i < a.count && j < b.count) {
            const bool first = a.index[i] <= b.index[j];
            index[out] = first ? a.index[i] : b.index[j];
            value[out++] = first ? a.value[i] : b.value[j];
            i += first;
            j += !first;
        }
    }
    const auto append = [&](SparseView part, int64_t from) {
        const auto rest = static_cast<size_t>(part.count - from);
        if (rest == 0) return;
        std::memcpy(index + out, part.index + from, rest * sizeof(int32_t));
        std::memcpy(value + out, part.value + from, rest * sizeof(float));
        out += part.count - from;
    };
    append(a, i);
    append(b, j);
}

}  // namespace

constexpr int64_t kAhead = 16;  // elements: as many lines are fetched at once, which a processor does not do by itself for stores

template <bool Store, class Index>
void fetch(const float *x, const Index *index, int64_t i, int64_t k) {
    if (i + kAhead < k) __builtin_prefetch(x + index[i + kAhead], Store);
}

template <class Index>
bool scatter_add(float *out, int64_t n, const Index *index, const float *value, int64_t k) {
    if (!inside(index, k, n)) return false;
    for (int64_t i = 0; i < k; ++i) {
        fetch<true>(out, index, i, k);
        out[index[i]] += value[i];
    }
    return true;
}

template <class Index>
bool clear(float *out, int64_t n, const Index *index, int64_t k) {
    if (!inside(index, k, n)) return false;
    for (int64_t i = 0; i < k; ++i) {
        fetch<true>(out, index, i, k);
        out[index[i]] = 0.0f;
    }
    return true;
}

template <class Index>
bool put(float *out, int64_t n, const Index *index, const float *value, int64_t k) {
    if (!inside(index, k, n)) return false;
    for (int64_t i = 0; i < k; ++i) {
        fetch<true>(out, index, i, k);
        out[index[i]] = value[i];
    }
    return true;
}

template <class Index>
bool gather(const float *x, int64_t n, const Index *index, float *value, int64_t k) {
    if (!inside(index, k, n)) return false;
    for (int64_t i = 0; i < k; ++i) {
        fetch<false>(x, index, i, k);
        value[i] = x[index[i]];
    }
    return true;
}

template bool put(float *, int64_t, const int32_t *, const float *, int64_t);
template bool put(float *, int64_t, const int64_t *, const float *, int64_t);
template bool gather(const float *, int64_t, const int32_t *, float *, int64_t);
template bool gather(const float *, int64_t, const int64_t *, float *, int64_t);
template bool scatter_add(float *, int64_t, const int32_t *, const float *, int64_t);
template bool scatter_add(float *, int64_t, const int64_t *, const float *, int64_t);
template bool clear(float *, int64_t, const int32_t *, int64_t);
template bool clear(float *, int64_t, const int64_t *, int64_t);

void merge(const std::vector<SparseView> &parts, int32_t *index, float *value) {
    // Neighbours are merged two by two, to and fro between the result and a copy, so that every element moves log2(parts) times.
    if (parts.empty()) return;
    int64_t total = 0;
    for (const SparseView &part : parts) total += part.count;
    int rounds = 1;
    while ((size_t{1} << rounds) < parts.size()) ++rounds;
    std::vector<int32_t> other_index(rounds > 1 ? static_cast<size_t>(total) : 0);
    std::vector<float> other_value(other_index.size());
    std::vector<SparseView> from = parts;
    for (int round = rounds; round > 0; --round) {
        const bool to_result = round % 2 == 1;
        int32_t *into_index = to_result ? index : other_index.data();
        float *into_value = to_result ? value : other_value.data();
        std::vector<SparseView> merged;
        int64_t done = 0;
        for (size_t i = 0; i < from.size(); i += 2) {
            const SparseView second = i + 1 < from.size() ? from[i + 1] : SparseView{nullptr, nullptr, 0};
            const int64_t count = from[i].count + second.count;
            merge_two(from[i], second, into_index + done, into_value + done);
            merged.push_back({into_index + done, into_value + done, count});
            done += count;
        }
        from = std::move(merged);
    }
}

int64_t add_equal(int32_t *index, float *value, int64_t count) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count;) {
        const int32_t position = index[i];
        float sum = 0.0f;
        for (; i < count && index[i] == position; ++i) sum += value[i];
        index[kept] = position;
        value[kept++] = sum;
    }
    return kept;
}

void split(const int32_t *index, int64_t k, const int32_t *stops, int64_t count, int64_t *ends) {
    const int32_t *from = index;
    for (int64_t i = 0; i < count; ++i) {
        from = std::lower_bound(from, index + k, stops[i]);
        ends[i] = from - index;
    }
}

void isin(const int32_t *index, int64_t k, const int32_t *others, int64_t count, bool *found) {
    int64_t j = 0;
    for (int64_t i = 0; i < k; ++i) {
        if (i && index[i] < index[i - 1]) j = 0;
        int64_t step = 1;  // leaps that double, so that a few among many, and many among a few, are quick
        while (j + step < count && others[j + step] < index[i]) {
            j += step;
            step *= 2;
        }
        j = std::lower_bound(others + j, others + std::min(j + step, count), index[i]) - others;
        found[i] = j < count && others[j] == index[i];
    }
}

}  // namespace sparsync
