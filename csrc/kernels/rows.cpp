// Selecting from elements that lie in rows all over a vector, where they are.
#include "blocks.hpp"
#include "candidates.hpp"

namespace sparsync {

namespace {

// The rows from `first` up to `last`, which may be the short one.
int64_t select_between(const Passes &passes, const float *x, const Rows &rows, int64_t first, int64_t last, Range range, Sink sink) {
    const int64_t whole = std::max(first, std::min(last, rows.length / rows.row));
    const auto base = [&](int64_t row) { return static_cast<int32_t>(row * rows.row); };
    int64_t count = passes.select_rows(x, rows.starts + first, whole - first, rows.row, base(first), range, sink);
    if (last > whole)
        count += passes.select(x + rows.starts[whole], rows.size(whole), base(whole), range, {sink.index + count, sink.value + count});
    return count;
}

void add_rows(const Passes &passes, const float *x, const Rows &rows, int64_t first, int64_t last, Candidates &candidates) {
    if (candidates.full() || first == last) return;
    const Sink sink = candidates.room((last - first) * rows.row);
    candidates.added(select_between(passes, x, rows, first, last, candidates.range(), sink));
}

bool collect(const Passes &passes, const float *x, const Rows &rows, Top wanted, int32_t bound, Found &found) {
    found.count = 0;
    Candidates candidates(found, wanted, bound);
    const int64_t some = std::max(int64_t{1}, kBlock / rows.row);
    for (int64_t first = 0; first < rows.count(); first += some)
        add_rows(passes, x, rows, first, std::min(first + some, rows.count()), candidates);
    return keep_wanted(found, wanted, bound);
}

}  // namespace

void top_of_rows(const Passes &passes, const float *x, Rows rows, Top wanted, Found &found) {
    found.count = 0;
    if (wanted.k == 0) return;
    if (wanted.guessed && collect(passes, x, rows, wanted, std::max(wanted.guess, wanted.lowest), found)) return;
    const auto value_at = [&](int64_t place) { return x[rows.starts[place / rows.row] + place % rows.row]; };
    const int32_t bound = sampled_bound({{0, rows.length}}, wanted, value_at);
    if (!collect(passes, x, rows, wanted, bound, found)) collect(passes, x, rows, wanted, wanted.lowest, found);
}

uint32_t add_top_of_rows(const Passes &passes, const float *residual, Gradient grad, float *out, int64_t n,
                         const std::vector<Wanted> &regions) {
    std::vector<Candidates> candidates;
    std::vector<int64_t> done(regions.size());  // rows
    bool guessed = true;
    for (const Wanted &region : regions) {
        region.found->count = 0;
        guessed = guessed && region.top.guessed && region.top.k > 0;
        candidates.emplace_back(*region.found, region.top, std::max(region.top.guess, region.top.lowest));
    }
    uint32_t greatest = 0;
    in_blocks({{0, n}}, [&](int64_t from, int64_t length) {
        greatest = std::max(greatest, passes.add(residual + from, at(grad, from), grad.type, out + from, length));
        // While the sums are in the nearest cache, the rows that end with them.
        for (size_t i = 0; guessed && i < regions.size(); ++i) {
            const Rows &rows = regions[i].rows;
            int64_t last = done[i];
            while (last < rows.count() && rows.starts[last] + rows.size(last) <= from + length) ++last;
            add_rows(passes, out, rows, done[i], last, candidates[i]);
            done[i] = last;
        }
    });
    for (size_t i = 0; i < regions.size(); ++i) {
        Top wanted = regions[i].top;
        if (guessed && keep_wanted(*regions[i].found, wanted, std::max(wanted.guess, wanted.lowest))) continue;
        wanted.guessed = wanted.guessed && !guessed;
        top_of_rows(passes, out, regions[i].rows, wanted, *regions[i].found);
    }
    return greatest;
}

void write_own(const Passes &passes, float *to, const float *weights, const float *unsent, int64_t from, int64_t n, Rows rows,
               float divisor, float share) {
    const int32_t *end = rows.starts + rows.count();
    int64_t row = std::upper_bound(rows.starts, end, from) - rows.starts - 1;  // the last that begins at `from` or before
    row = std::max(row, int64_t{0});
    in_blocks({{from, from + n}}, [&](int64_t start, int64_t length) {
        passes.less(to + (start - from), weights + start, unsent + start, length, share);
        for (; row < rows.count() && rows.starts[row] < start + length; ++row) {
            const int64_t first = std::max<int64_t>(start, rows.starts[row]), last = rows.starts[row] + rows.size(row);
            for (int64_t i = first; i < std::min(start + length, last); ++i)
                to[i - from] = weights[i] - unsent[i] / divisor * share;
            if (last > start + length) break;  // the next block has the rest of it
        }
    });
}

void divide_rows(float *x, Rows rows, float divisor) {
    for (int64_t i = 0; i < rows.count(); ++i) {
        float *row = x + rows.starts[i];
        const int64_t size = rows.size(i);
        for (int64_t j = 0; j < size; ++j) row[j] /= divisor;
    }
}

bool locate(Rows rows, const int32_t *place, int64_t k, int32_t *position) {
    bool inside = true;
    for (int64_t i = 0; i < k; ++i) inside &= static_cast<uint32_t>(place[i]) < static_cast<uint64_t>(rows.length);
    if (!inside) return false;
    const auto row = static_cast<uint32_t>(rows.row);
    const int shift = row & (row - 1) ? -1 : __builtin_ctz(row);  // a division takes longer
    for (int64_t i = 0; i < k; ++i) {
        const auto at = static_cast<uint32_t>(place[i]), number = shift < 0 ? at / row : at >> shift;
        position[i] = rows.starts[number] + static_cast<int32_t>(at - number * row);
    }
    return true;
}

}  // namespace sparsync
