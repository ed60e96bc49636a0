// The kernels as Python sees them: addresses and lengths, checked by the caller in sparsync/kernels/cpu.py; the GIL is released.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "kernels/kernels.hpp"

namespace nb = nanobind;
using namespace sparsync;

namespace {

using Address = uintptr_t;

const float *floats(Address address) { return reinterpret_cast<const float *>(address); }

const Kernels *find(const std::string &level) {
    for (const Kernels *kernels : {kernels_avx512(), kernels_avx2(), kernels_scalar()})
        if (kernels && level == kernels->name) return kernels;
    throw nb::value_error("no such level on this machine");
}

}  // namespace

void bind_kernels(nb::module_ &m) {
    m.def(
        "levels",
        [] {
            std::vector<std::string> names;
            for (const Kernels *kernels : {kernels_avx512(), kernels_avx2(), kernels_scalar()})
                if (kernels) names.emplace_back(kernels->name);
            return names;
        },
        "The instruction sets this machine has kernels for, the fastest first.");
    m.def("all_finite", [](const std::string &level, Address x, int64_t n) {
        const Kernels *kernels = find(level);
        nb::gil_scoped_release release;
        return kernels->all_finite(floats(x), n);
    });
}
