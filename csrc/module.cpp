// The Python module sparsync.kernels._cpu.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_kernels(nb::module_ &m);
#ifdef SPARSYNC_CODECS
void bind_codecs(nb::module_ &m);
#endif

NB_MODULE(_cpu, m) {
    bind_kernels(m);
#ifdef SPARSYNC_CODECS
    bind_codecs(m);
#endif
}
