// The Python module revrnn._cpu. Tensors arrive as addresses: src/revrnn/kernels/cpu.py has checked
// device, dtype, shape and contiguity, and keeps the tensors alive during the call.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "heap.h"
#include "kernels.h"
#include "pool.h"
#include "sealing.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Address = uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

const revrnn::Tier& tier(const std::string& name) {
  const revrnn::Tier* found = revrnn::find_tier(name.c_str());
  if (!found) throw std::invalid_argument("this machine has no CPU tier called '" + name + "'");
  return *found;
}

std::tuple<int, int64_t, int64_t> as_tuple(const revrnn::Status& status) {
  return {static_cast<int>(status.fault), status.step, status.row};
}

}  // namespace

NB_MODULE(_cpu, m) {
  using revrnn::Chunk;
  using revrnn::BackpropChunk;
  using revrnn::Shape;

  m.attr("LANES") = revrnn::kLanes;
  m.attr("RADIX_H") = REVRNN_RADIX_H;
  m.attr("RADIX_Z") = REVRNN_RADIX_Z;

  m.def("tiers", [] {
    const char* names[3];
    const int n = revrnn::available_tiers(names);
    return std::vector<std::string>(names, names + n);
  });

  m.def("borrow_openmp", [](Address gomp_parallel) {
    revrnn::borrow_openmp(reinterpret_cast<revrnn::OpenMpParallel>(gomp_parallel));
  });

  m.def("gather_offcuts", &revrnn::gather_offcuts);
  m.def("keep_freed_memory", &revrnn::keep_freed_memory);
  m.def("use_large_pages", [](Address block, size_t bytes) {
    revrnn::use_large_pages(at<void>(block), bytes);
  });

  const auto without_gil = nb::call_guard<nb::gil_scoped_release>();
  m.def(
      "compact",
      [](Address region, int64_t capacity, Address fill, int64_t rows, Address out) {
        revrnn::compact(at<uint8_t>(region), capacity, at<int64_t>(fill), rows, at<uint8_t>(out));
      },
      without_gil);
  m.def(
      "lay_out",
      [](Address sealed, int64_t rows, Address fill, Address begin) {
        return revrnn::lay_out(at<int32_t>(sealed), rows, at<int64_t>(fill), at<int64_t>(begin));
      },
      without_gil);
  m.def(
      "pack_lanes",
      [](Address lanes, int64_t rows, Address packed) {
        revrnn::pack_lanes(at<int32_t>(lanes), rows, at<uint8_t>(packed));
      },
      without_gil);
  m.def(
      "unpack_lanes",
      [](Address packed, int64_t rows, Address lanes) {
        revrnn::unpack_lanes(at<uint8_t>(packed), rows, at<int32_t>(lanes));
      },
      without_gil);

  nb::class_<Shape>(m, "Shape")
      .def(
          "__init__",
          [](Shape* self, int cell, int rule, int64_t blocks, int64_t inputs, int64_t hidden,
             int64_t stored, float floor, int32_t z_min, bool gumbel, float softness, float zoneout,
             float dropout, bool draws, uint64_t seed) {
            new (self) Shape{static_cast<revrnn::Cell>(cell), static_cast<revrnn::Rule>(rule),
                             blocks, inputs, hidden, stored, floor, z_min, gumbel, softness,
                             zoneout, dropout, draws, seed};
          },
          "cell"_a, "rule"_a, "blocks"_a, "inputs"_a, "hidden"_a, "stored"_a, "floor"_a, "z_min"_a,
          "gumbel"_a, "softness"_a, "zoneout"_a, "dropout"_a, "draws"_a, "seed"_a);

  m.def("packed_floats", [](const std::string& name, const Shape& shape, bool backward) {
    return tier(name).packed_floats(shape, backward);
  });
  m.def("scratch_floats", [](const std::string& name, const Shape& shape, int64_t batch, int threads) {
    return tier(name).scratch_floats(shape, batch, threads);
  });
  m.def(
      "pack",
      [](const std::string& name, const Shape& shape, Address ih, Address hh, Address bias,
         bool backward, Address packed, int threads) {
        const revrnn::Tier& t = tier(name);
        const revrnn::Weights weights{at<float>(ih), at<float>(hh), at<float>(bias)};
        nb::gil_scoped_release release;
        t.pack(shape, weights, backward, at<float>(packed), threads);
      },
      "tier"_a, "shape"_a, "ih"_a, "hh"_a, "bias"_a, "backward"_a, "packed"_a, "threads"_a);

  m.def(
      "walk",
      [](const std::string& name, bool reverse, const Shape& shape, int64_t steps, int64_t rows,
         int64_t batch, Address offsets, Address active, int64_t first, int64_t stride,
         Address packed, Address x, Address state, Address lanes, Address stack, Address begin,
         Address fill, Address ideal, bool writing, Address stored, Address out, int64_t out_stride,
         int64_t out_units, Address gates, Address old, Address mid, Address extra, Address scratch,
         int threads) {
        const revrnn::Tier& t = tier(name);
        const Chunk chunk{shape,
                          steps,
                          rows,
                          batch,
                          at<int64_t>(offsets),
                          at<int64_t>(active),
                          first,
                          stride,
                          at<float>(packed),
                          at<float>(x),
                          at<int32_t>(state),
                          {at<int32_t>(lanes), at<uint8_t>(stack), at<int64_t>(begin),
                           at<int64_t>(fill), at<double>(ideal), writing},
                          at<int32_t>(stored),
                          at<float>(out),
                          out_stride,
                          out_units,
                          at<float>(gates),
                          at<float>(old),
                          at<float>(mid),
                          at<float>(extra),
                          at<float>(scratch),
                          threads};
        nb::gil_scoped_release release;
        const revrnn::Status status = reverse ? t.reverse(chunk) : t.forward(chunk);
        nb::gil_scoped_acquire acquire;
        return as_tuple(status);
      },
      "tier"_a, "reverse"_a, "shape"_a, "steps"_a, "rows"_a, "batch"_a, "offsets"_a, "active"_a,
      "first"_a, "stride"_a, "packed"_a, "x"_a, "state"_a, "lanes"_a, "stack"_a, "begin"_a,
      "fill"_a, "ideal"_a, "writing"_a, "stored"_a, "out"_a, "out_stride"_a, "out_units"_a,
      "gates"_a, "old"_a, "mid"_a, "extra"_a, "scratch"_a, "threads"_a);

  m.def(
      "backprop",
      [](const std::string& name, const Shape& shape, int64_t steps, int64_t rows, int64_t batch,
         Address offsets, Address active, int64_t first, int64_t stride, Address packed, Address x,
         Address gates, Address old, Address mid, Address extra, Address d_out,
         int64_t d_out_stride, int64_t d_out_units, Address d_state, Address d_x, Address d_ih,
         Address d_hh, Address d_bias, Address scratch, int threads) {
        const revrnn::Tier& t = tier(name);
        const BackpropChunk chunk{shape,
                                  steps,
                                  rows,
                                  batch,
                                  at<int64_t>(offsets),
                                  at<int64_t>(active),
                                  first,
                                  stride,
                                  at<float>(packed),
                                  at<float>(x),
                                  at<float>(gates),
                                  at<float>(old),
                                  at<float>(mid),
                                  at<float>(extra),
                                  at<float>(d_out),
                                  d_out_stride,
                                  d_out_units,
                                  at<float>(d_state),
                                  at<float>(d_x),
                                  at<float>(d_ih),
                                  at<float>(d_hh),
                                  at<float>(d_bias),
                                  at<float>(scratch),
                                  threads};
        nb::gil_scoped_release release;
        t.backprop(chunk);
      },
      "tier"_a, "shape"_a, "steps"_a, "rows"_a, "batch"_a, "offsets"_a, "active"_a, "first"_a,
      "stride"_a, "packed"_a, "x"_a, "gates"_a, "old"_a, "mid"_a, "extra"_a, "d_out"_a,
      "d_out_stride"_a, "d_out_units"_a, "d_state"_a, "d_x"_a, "d_ih"_a, "d_hh"_a, "d_bias"_a,
      "scratch"_a, "threads"_a);
}
