// SPDX-License-Identifier: Apache-2.0
// The Python module ddp_torch._C.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "backend.h"

namespace {

c10::intrusive_ptr<c10d::Backend> Create(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                         std::chrono::milliseconds timeout) {
  return c10::make_intrusive<ddp_torch::DdpBackend>(store, rank, size, timeout);
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.def("create", &Create, pybind11::arg("store"), pybind11::arg("rank"), pybind11::arg("size"),
             pybind11::arg("timeout"), pybind11::call_guard<pybind11::gil_scoped_release>());
}
