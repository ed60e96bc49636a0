// The Python module sparsync.kernels._cpu.
#include <nanobind/nanobind.h>

#include "tensors.hpp"

void bind_kernels(nanobind::module_ &m);
void bind_codecs(nanobind::module_ &m);
void bind_packets(nanobind::module_ &m);
void bind_steps(nanobind::module_ &m);

NB_MODULE(_cpu, m) {
    sparsync::find_torch();
    bind_kernels(m);
    bind_codecs(m);
    bind_packets(m);
    bind_steps(m);
}
