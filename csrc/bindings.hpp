// What the bindings of kernels and of packets share.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <string>

#include "kernels/core.hpp"
#include "tensors.hpp"

namespace sparsync {

// Runs `work` without the GIL.
template <class Work>
auto unlocked(Work work) {
    const nb::gil_scoped_release release;
    return work();
}

inline void expect_equal(int64_t one, int64_t other, const char *what) {
    if (one != other)
        throw nb::value_error((std::string(what) + " must have one length, got " + std::to_string(one) + " and " +
                               std::to_string(other)).c_str());
}

inline Gradient gradient(const Tensor &grad) {
    const Type type = grad.element == Element::float32    ? Type::float32
                      : grad.element == Element::bfloat16 ? Type::bfloat16
                                                          : Type::float16;
    return {grad.data, type};
}

// Whether one number, if any, is not zero.
inline bool is_set(nb::handle skip) {
    if (skip.is_none()) return false;
    const int set = PyObject_IsTrue(skip.ptr());
    if (set < 0) throw nb::python_error();
    return set;
}

// Raises ValueError where it does not lie in [0, n].
inline Span span_in(nb::handle span, int64_t n) {
    const Span found{nb::cast<int64_t>(span.attr("start")), nb::cast<int64_t>(span.attr("stop"))};
    if (found.start < 0 || found.stop < found.start || found.stop > n)
        throw nb::value_error(("a span must lie in [0, " + std::to_string(n) + "], got [" + std::to_string(found.start) +
                               ", " + std::to_string(found.stop) + ")").c_str());
    return found;
}

// In bind_codecs.cpp: raise where values cannot have these bits, a mean these ranks, or k values these bytes.
void expect_value_bits(int64_t bits);
void expect_ranks(int64_t P);
void expect_nbytes(int64_t nbytes, int64_t k, int bits);

// A sparsync.core.Sparse.
nb::object sparse(const nb::object &index, const nb::object &value, int64_t length);

// The attributes of a sparsync.core.Rows, checked against a vector of n elements.
struct Read {
    nb::object held;
    Tensor starts;
    Rows rows{};

    explicit Read(nb::handle object) : held(object.attr("starts")), starts(read(held)) {
        rows = {starts.as<int32_t>(), nb::cast<int64_t>(object.attr("row")), nb::cast<int64_t>(object.attr("length"))};
    }

    bool taken() const { return starts.is(Element::int32); }

    // Raises ValueError where there are too few rows.
    void expect_enough() const {
        const auto possible = [](int64_t number) { return number >= 0 && number <= INT32_MAX; };
        if (rows.row < 1 || !possible(rows.row) || !possible(rows.length) || rows.count() > starts.length)
            throw nb::value_error((std::to_string(rows.length) + " elements in rows of " + std::to_string(rows.row) +
                                   " do not fit " + std::to_string(starts.length) + " rows").c_str());
    }

    // Raises IndexError where a row is not inside of [0, n).
    void expect_inside(int64_t n) const {
        int64_t low = 0, high = -1;
        for (int64_t i = 0; i < rows.length / rows.row; ++i) {
            low = std::min<int64_t>(low, rows.starts[i]);
            high = std::max<int64_t>(high, rows.starts[i]);
        }
        high += rows.row;  // of whole rows, the end
        if (rows.length < rows.row) high = 0;
        if (rows.length % rows.row) {
            const int64_t last = rows.count() - 1;
            low = std::min<int64_t>(low, rows.starts[last]);
            high = std::max(high, rows.starts[last] + rows.size(last));
        }
        if (low < 0 || high > n)
            throw nb::index_error(("rows must lie in [0, " + std::to_string(n) + ") for " + std::to_string(n) +
                                   " elements, got some outside").c_str());
    }
};

}  // namespace sparsync
