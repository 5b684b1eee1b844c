// Steps that run a compiled worker of ours on torch's threads.

#pragma once

#include "step_values.h"

#include <ATen/Parallel.h>

#include <algorithm>

namespace {

using Worker = void (*)(void*);
using Parallel = void (*)(Worker, void*, unsigned, unsigned); // GOMP_parallel

// A word of a launch that holds an address: of a value, or of the launch's own words where `value` is -1.
struct AddressWord {
  size_t word;
  int64_t value, offset;
};

struct LaunchStep {
  Worker worker;
  std::vector<int64_t> words;
  std::vector<AddressWord> addresses;
  int threads;

  // Write the words of one run, and return whether several of `most` threads divide the work. They do so by counters in
  // the words, so each run needs a copy of them.
  bool put(const Frame& frame, int64_t* data, int most) const {
    std::memcpy(data, words.data(), words.size() * sizeof(int64_t));
    for (const AddressWord& a : addresses)
      data[a.word] = (a.value < 0 ? reinterpret_cast<int64_t>(data) : reinterpret_cast<int64_t>(frame.address(a.value))) + a.offset;
    data[1] = std::min(threads, most);
    return data[1] > 1;
  }
};

// From ("launch", worker, words as bytes, ((word, value, offset), ...), threads).
LaunchStep launch_step(PyObject* told, size_t values) {
  unsigned long long worker;
  const char* bytes;
  Py_ssize_t size;
  PyObject* addresses;
  int threads;
  if (!PyArg_ParseTuple(told, "Ky#O!i", &worker, &bytes, &size, &PyTuple_Type, &addresses, &threads))
    throw python_error();
  LaunchStep step{reinterpret_cast<Worker>(worker), Ints(static_cast<size_t>(size) / sizeof(int64_t)), {}, threads};
  TORCH_CHECK_VALUE(step.worker && step.words.size() >= 2 && step.words.size() * sizeof(int64_t) == static_cast<size_t>(size), "a launch of ", size, " bytes: two words or more would do");
  std::memcpy(step.words.data(), bytes, static_cast<size_t>(size));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(addresses); i++) {
    long long word, value, offset;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(addresses, i), "LLL", &word, &value, &offset))
      throw python_error();
    TORCH_CHECK_VALUE(word >= 0 && word < static_cast<int64_t>(step.words.size()) && value >= -1 && value < static_cast<int64_t>(values), "word ", word, " of a launch is the address of value ", value);
    step.addresses.push_back({static_cast<size_t>(word), value, offset});
  }
  return step;
}

} // namespace
