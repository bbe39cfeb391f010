// Binds the C++ ops to torch. This file alone knows torch: it checks every argument and hands
// pointers and sizes to the algorithms, which know none of it.

#include <torch/csrc/stable/library.h>

#include <string>

namespace {

// What this library is, for start-up logs and bug reports: version and compiler.
std::string build_info() { return std::string("plait ") + PLAIT_VERSION + ", " + __VERSION__; }

}  // namespace

STABLE_TORCH_LIBRARY(plait, m) { m.def("build_info() -> str"); }

// An op without a tensor argument has no device to be dispatched by.
STABLE_TORCH_LIBRARY_IMPL(plait, CompositeExplicitAutograd, m) {
  m.impl("build_info", TORCH_BOX(&build_info));
}
