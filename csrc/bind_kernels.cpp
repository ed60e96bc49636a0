// The kernels as Python sees them: addresses and lengths, checked by the caller in sparsync/kernels/cpu.py. The GIL is released.
//
// What a kernel selects stays in buffers of the calling thread until `take` copies it to tensors of just that length.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/core.hpp"
#include "kernels/move.hpp"
#include "kernels/sparse.hpp"

namespace nb = nanobind;
using namespace sparsync;

namespace {

using Address = uintptr_t;
using Pieces = std::vector<std::tuple<Address, Address, int64_t>>;

template <class Element>
Element *at(Address address) {
    return reinterpret_cast<Element *>(address);
}

const Kernels &level_of(const std::string &level) {
    const Kernels *kernels = find(level);
    if (!kernels) throw nb::value_error(("this machine has no kernels for " + level).c_str());
    return *kernels;
}

Gradient gradient(Address grad, int type) { return {at<void>(grad), static_cast<Type>(type)}; }

Parts &parts_of_this_thread() {
    thread_local Parts parts;
    return parts;
}

int64_t found() {
    int64_t count = 0;
    for (const Found &part : parts_of_this_thread()) count += part.count;
    return count;
}

template <class Index>
void take(Address index, Address value) {
    nb::gil_scoped_release release;
    auto *next_index = at<Index>(index);
    auto *next_value = at<float>(value);
    for (Found &part : parts_of_this_thread()) {
        next_index = std::copy(part.index(), part.index() + part.count, next_index);
        if (next_value) next_value = std::copy(part.value(), part.value() + part.count, next_value);
        part.release();
    }
}

std::vector<SparseView> views(const Pieces &pieces) {
    std::vector<SparseView> result;
    for (const auto &[index, value, count] : pieces) result.push_back({at<int32_t>(index), at<float>(value), count});
    return result;
}

void bind_passes(nb::module_ &m) {
    m.def("plain", [](const std::string &level, Address a, Address b, int64_t n, int threads) {
        nb::gil_scoped_release release;
        plain(level_of(level), at<float>(a), at<float>(b), n, threads);
    });
    m.def("largest", [](const std::string &level, Address x, int64_t n) {
        nb::gil_scoped_release release;
        return largest(level_of(level), at<float>(x), n);
    });
    m.def("add", [](const std::string &level, Address residual, Address grad, int type, Address out, int64_t n, int threads) {
        nb::gil_scoped_release release;
        return add(level_of(level), at<float>(residual), gradient(grad, type), at<float>(out), n, threads);
    });
}

void bind_selection(nb::module_ &m) {
    m.def("select", [](const std::string &level, Address x, int64_t n, uint32_t low, uint32_t high, int threads) {
        nb::gil_scoped_release release;
        select(level_of(level), at<float>(x), n, {low, high}, threads, parts_of_this_thread());
        return found();
    });
    m.def("add_take", [](const std::string &level, Address residual, Address grad, int type, int64_t n, int64_t start,
                         int64_t stop, uint32_t low, uint32_t high, int threads) {
        nb::gil_scoped_release release;
        const uint32_t most = add_take(level_of(level), at<float>(residual), gradient(grad, type), n, {start, stop},
                                       {low, high}, threads, parts_of_this_thread());
        return std::make_tuple(found(), most);
    });
    m.def("top", [](const std::string &level, Address x, int64_t n, int64_t start, int64_t stop, int64_t k, bool numbers,
                    int32_t lowest, bool guessed, int32_t guess, int threads) {
        nb::gil_scoped_release release;
        const Order order = numbers ? Order::number : Order::magnitude;
        top(level_of(level), at<float>(x), {{0, start}, {stop, n}}, {k, order, lowest, guessed, guess}, threads,
            parts_of_this_thread());
        return found();
    });
    m.def("add_top", [](const std::string &level, Address residual, Address grad, int type, Address out, int64_t n,
                        int64_t start, int64_t stop, int64_t k, int32_t lowest, bool guessed, int32_t guess, int threads) {
        nb::gil_scoped_release release;
        const Top wanted{k, Order::magnitude, lowest, guessed, guess};
        const uint32_t most = add_top(level_of(level), at<float>(residual), gradient(grad, type), at<float>(out), n,
                                      {start, stop}, wanted, threads, parts_of_this_thread());
        return std::make_tuple(found(), most);
    });
    m.def("take", take<int32_t>);
    m.def("take_wide", take<int64_t>);
}

void bind_sparse(nb::module_ &m) {
    m.def("histogram", [](Address x, int64_t n, Address counts) {
        nb::gil_scoped_release release;
        histogram(at<float>(x), n, at<int64_t>(counts));
    });
    m.def("scatter_add", [](Address out, int64_t n, Address index, bool wide, Address value, int64_t k) {
        nb::gil_scoped_release release;
        return wide ? scatter_add(at<float>(out), n, at<int64_t>(index), at<float>(value), k)
                    : scatter_add(at<float>(out), n, at<int32_t>(index), at<float>(value), k);
    });
    m.def("put", [](Address out, int64_t n, Address index, bool wide, Address value, int64_t k) {
        nb::gil_scoped_release release;
        return wide ? put(at<float>(out), n, at<int64_t>(index), at<float>(value), k)
                    : put(at<float>(out), n, at<int32_t>(index), at<float>(value), k);
    });
    m.def("gather", [](Address x, int64_t n, Address index, bool wide, Address value, int64_t k) {
        nb::gil_scoped_release release;
        return wide ? gather(at<float>(x), n, at<int64_t>(index), at<float>(value), k)
                    : gather(at<float>(x), n, at<int32_t>(index), at<float>(value), k);
    });
    m.def("move", [](Address to, Address from, int64_t n) {
        nb::gil_scoped_release release;
        move(at<float>(to), at<float>(from), n);
    });
    m.def("clear", [](Address out, int64_t n, Address index, bool wide, int64_t k) {
        nb::gil_scoped_release release;
        return wide ? clear(at<float>(out), n, at<int64_t>(index), k) : clear(at<float>(out), n, at<int32_t>(index), k);
    });
    m.def("merge", [](const Pieces &pieces, Address index, Address value) {
        nb::gil_scoped_release release;
        merge(views(pieces), at<int32_t>(index), at<float>(value));
    });
    m.def("merge_and_add", [](const Pieces &pieces, Address index, Address value) {
        nb::gil_scoped_release release;
        int64_t total = 0;
        for (const auto &piece : pieces) total += std::get<2>(piece);
        merge(views(pieces), at<int32_t>(index), at<float>(value));
        return add_equal(at<int32_t>(index), at<float>(value), total);
    });
    m.def("split", [](Address index, int64_t k, const std::vector<int32_t> &stops) {
        nb::gil_scoped_release release;
        std::vector<int64_t> ends(stops.size());
        split(at<int32_t>(index), k, stops.data(), static_cast<int64_t>(stops.size()), ends.data());
        return ends;
    });
    m.def("among", [](Address index, int64_t k, Address others, int64_t count, Address result) {
        nb::gil_scoped_release release;
        among(at<int32_t>(index), k, at<int32_t>(others), count, at<bool>(result));
    });
}

}  // namespace

void bind_kernels(nb::module_ &m) {
    m.def("levels", levels, "The instruction sets this machine has kernels for, the fastest first.");
    bind_passes(m);
    bind_selection(m);
    bind_sparse(m);
}
