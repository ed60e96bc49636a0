// How whole vectors are worked on: in blocks, whose selections fit a buffer, by a few threads for the length of one call.
#pragma once

#include <algorithm>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

#include "core.hpp"

namespace sparsync {

// Runs work(part) for each part at once, part 0 on this thread; what a part throws is thrown here.
template <class Work>
void in_parallel(int parts, Work work) {
    std::vector<std::exception_ptr> errors(static_cast<size_t>(parts));
    auto guarded = [&](int part) {
        try {
            work(part);
        } catch (...) {
            errors[static_cast<size_t>(part)] = std::current_exception();
        }
    };
    std::vector<std::thread> others;
    others.reserve(static_cast<size_t>(parts));
    int started = 1;
    try {
        for (; started < parts; ++started) others.emplace_back(guarded, started);
    } catch (const std::system_error &) {  // no more threads to be had: this one does the rest
    }
    guarded(0);
    for (int part = started; part < parts; ++part) guarded(part);
    for (auto &each : others) each.join();
    for (auto &error : errors)
        if (error) std::rethrow_exception(error);
}

// `spans`, cut into `parts` of nearly equal length; cuts lie at multiples of 16 elements, a cache line.
inline std::vector<std::vector<Span>> cut(const std::vector<Span> &spans, int parts) {
    int64_t total = 0;
    for (const Span &span : spans) total += span.stop - span.start;
    std::vector<std::vector<Span>> result(static_cast<size_t>(parts));
    int64_t done = 0;
    size_t part = 0;
    for (Span span : spans) {
        while (span.start < span.stop) {
            const auto next = static_cast<int64_t>(part) + 1;
            const int64_t goal = next == parts ? total : total / parts * next / 16 * 16;
            const int64_t length = span.stop - span.start < goal - done ? span.stop - span.start : goal - done;
            if (length > 0) result[part].push_back({span.start, span.start + length});
            span.start += length;
            done += length;
            if (done == goal && next < parts) ++part;
        }
    }
    return result;
}

constexpr int64_t kBlock = 8192;

// Runs work(start, length) for each block of `spans`, in order.
template <class Work>
void in_blocks(const std::vector<Span> &spans, Work work) {
    for (const Span &span : spans)
        for (int64_t start = span.start; start < span.stop; start += kBlock)
            work(start, std::min(kBlock, span.stop - start));
}

inline const void *at(Gradient grad, int64_t position) {
    return static_cast<const char *>(grad.data) + position * (grad.type == Type::float32 ? 4 : 2);
}

// One empty buffer for each thread.
inline void start(Parts &parts, int threads) {
    while (parts.size() < static_cast<size_t>(threads)) parts.emplace_back();
    for (Found &each : parts) each.count = 0;
}

}  // namespace sparsync
