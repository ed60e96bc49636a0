// The k largest of a list, in time linear in its length whatever is in it: a radix select on the bits of the numbers.
#include <algorithm>
#include <cstring>
#include <vector>

#include "core.hpp"

namespace sparsync {

namespace {

constexpr int kDigit = 11;
constexpr size_t kBins = size_t{1} << kDigit;

struct Rank {
    uint32_t order;
    int64_t above;  // how many are larger
};

// The k-th largest of `orders`, 1 <= k <= count; `orders` is used up.
Rank kth_of(uint32_t *orders, int64_t count, int64_t k) {
    int64_t above = 0;
    for (;;) {
        uint32_t least = orders[0], most = orders[0];
        for (int64_t i = 1; i < count; ++i) {
            least = std::min(least, orders[i]);
            most = std::max(most, orders[i]);
        }
        if (least == most) return {least, above};
        int shift = 0;
        while ((most - least) >> shift >= kBins) ++shift;
        uint32_t bins[2][kBins] = {};  // two, because the same bin twice in a row would wait for itself
        for (int64_t i = 0; i + 1 < count; i += 2) {
            ++bins[0][(orders[i] - least) >> shift];
            ++bins[1][(orders[i + 1] - least) >> shift];
        }
        if (count % 2) ++bins[0][(orders[count - 1] - least) >> shift];
        uint32_t bin = kBins;
        int64_t inside = 0;
        while (above + inside < k) {
            above += inside;
            --bin;
            inside = int64_t{bins[0][bin]} + bins[1][bin];
        }
        if (shift == 0) return {least + bin, above};
        int64_t kept = 0;
        for (int64_t i = 0; i < count; ++i) {
            const uint32_t order = orders[i];
            orders[kept] = order;
            kept += (order - least) >> shift == bin;
        }
        count = kept;
    }
}

}  // namespace

uint32_t smallest_magnitude(const float *x, int64_t n) {
    if (n == 0) return 0;
    int32_t least = INT32_MAX, most = 0;
    for (int64_t i = 0; i < n; ++i) {
        int32_t bits;
        std::memcpy(&bits, x + i, sizeof bits);
        bits &= INT32_MAX;
        least = bits < least ? bits : least;
        most = bits > most ? bits : most;
    }
    return static_cast<uint32_t>(most > static_cast<int32_t>(kInfinity) ? most : least);
}

uint32_t keep_top(Found &found, int64_t k) {
    thread_local std::vector<uint32_t> orders, work;
    orders.resize(static_cast<size_t>(found.count));
    for (int64_t i = 0; i < found.count; ++i) {
        uint32_t bits;
        std::memcpy(&bits, found.value() + i, sizeof bits);
        orders[static_cast<size_t>(i)] = std::min(bits & kMagnitude, kInfinity);
    }
    work = orders;
    const Rank kth = kth_of(work.data(), found.count, k);
    int64_t equals = k - kth.above, kept = 0;
    for (int64_t i = 0; i < found.count; ++i) {
        const bool equal = orders[static_cast<size_t>(i)] == kth.order;
        const bool wanted = orders[static_cast<size_t>(i)] > kth.order || (equal && equals > 0);
        equals -= equal;
        found.index()[kept] = found.index()[i];
        found.value()[kept] = found.value()[i];
        kept += wanted;
    }
    found.count = kept;
    return kth.order;
}

}  // namespace sparsync
