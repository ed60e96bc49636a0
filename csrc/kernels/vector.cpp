// Passes over a whole vector, on one thread or a few.
#include <algorithm>

#include "parallel.hpp"

namespace sparsync {

const Kernels *find(const std::string &level) {
    for (const Kernels *kernels : {kernels_avx512(), kernels_avx2(), kernels_scalar()})
        if (kernels && level == kernels->name) return kernels;
    return nullptr;
}

std::vector<std::string> levels() {
    std::vector<std::string> names;
    for (const Kernels *kernels : {kernels_avx512(), kernels_avx2(), kernels_scalar()})
        if (kernels) names.emplace_back(kernels->name);
    return names;
}

void plain(const Kernels &kernels, const float *a, float *b, int64_t n, int threads) {
    const auto shares = cut({{0, n}}, threads);
    in_parallel(threads, [&](int part) {
        for (const Span &span : shares[static_cast<size_t>(part)])
            kernels.plain(a + span.start, b + span.start, span.stop - span.start);
    });
}

uint32_t largest(const Kernels &kernels, const float *x, int64_t n) { return kernels.largest(x, n); }

uint32_t add(const Kernels &kernels, const float *residual, Gradient grad, float *out, int64_t n, int threads) {
    const auto shares = cut({{0, n}}, threads);
    std::vector<uint32_t> most(static_cast<size_t>(threads));
    in_parallel(threads, [&](int part) {
        for (const Span &span : shares[static_cast<size_t>(part)])
            most[static_cast<size_t>(part)] = std::max(
                most[static_cast<size_t>(part)], kernels.add(residual + span.start, at(grad, span.start), grad.type,
                                                             out + span.start, span.stop - span.start));
    });
    return *std::max_element(most.begin(), most.end());
}

void select(const Kernels &kernels, const float *x, int64_t n, Range range, int threads, Parts &parts) {
    start(parts, threads);
    const auto shares = cut({{0, n}}, threads);
    in_parallel(threads, [&](int part) {
        Found &found = parts[static_cast<size_t>(part)];
        in_blocks(shares[static_cast<size_t>(part)], [&](int64_t start, int64_t length) {
            found.reserve(found.count + length);
            found.count += kernels.select(x + start, length, static_cast<int32_t>(start), range, found.end());
        });
    });
}

uint32_t add_take(const Kernels &kernels, float *residual, Gradient grad, int64_t n, Span span, Range range, int threads,
                  Parts &parts) {
    start(parts, threads);
    const auto shares = cut({{0, span.start}, span, {span.stop, n}}, threads);
    std::vector<uint32_t> most(static_cast<size_t>(threads));
    in_parallel(threads, [&](int part) {
        Found &found = parts[static_cast<size_t>(part)];
        uint32_t &seen = most[static_cast<size_t>(part)];
        in_blocks(shares[static_cast<size_t>(part)], [&](int64_t start, int64_t length) {
            const bool inside = start >= span.start && start < span.stop;
            found.reserve(found.count + length);
            found.count += kernels.add_take(residual + start, at(grad, start), grad.type, length,
                                            static_cast<int32_t>(start), inside ? range : kNone, found.end(), &seen);
        });
    });
    return *std::max_element(most.begin(), most.end());
}

}  // namespace sparsync
