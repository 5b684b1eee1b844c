// Values of a program of steps: where each tensor lies, and the tensors of one call in flight.

#pragma once

#ifndef PY_SSIZE_T_CLEAN
#define PY_SSIZE_T_CLEAN
#endif
#include <Python.h>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace {

using at::Tensor;
using Ints = std::vector<int64_t>;

// A constant is held. One in the arena lies there at every call. Fresh memory is allocated at each call. A returned one is what a step gives. A view shows the memory of another value.
enum class Kind { input, constant, arena, fresh, returned, view };

struct Value {
  Kind kind;
  at::ScalarType dtype;
  Ints shape, strides;
  size_t root;       // the value whose memory it shows: itself, unless it is a view
  int64_t offset;    // bytes: of a view from its root's first element, of one in the arena from the arena's beginning
  Tensor tensor;     // of a constant
  int64_t version;   // of a constant, -1 for one without a counter
  const void* data;  // of a constant
  std::vector<size_t> views; // of a root: the values that show its memory

  // Whether a tensor lies as this value says. Strides along axes of size 1 say nothing.
  bool has(const Tensor& t) const {
    if (t.scalar_type() != dtype || t.layout() != at::kStrided || !t.device().is_cpu() || t.sizes() != at::IntArrayRef(shape))
      return false;
    const at::IntArrayRef have = t.strides();
    for (size_t i = 0; i < shape.size(); i++)
      if (shape[i] != 1 && have[i] != strides[i])
        return false;
    return true;
  }

  bool has_changed() const {
    return (version >= 0 && tensor._version() != version) || tensor.const_data_ptr() != data;
  }
};

// A tensor over the memory of another, from `offset` bytes behind its first element on.
Tensor shown(const Tensor& base, int64_t offset, at::ScalarType dtype, const Ints& shape, const Ints& strides) {
  const int64_t size = static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t start = base.storage_offset() * static_cast<int64_t>(base.element_size()) + offset;
  TORCH_CHECK(start % size == 0, "a view begins at byte ", start, ": a multiple of ", size, " would do");
  c10::Storage storage = base.storage();
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), c10::scalarTypeToTypeMeta(dtype));
  c10::TensorImpl* impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(start / size);
  impl->set_sizes_and_strides(shape, strides);
  return made;
}

// What one call in flight works on.
struct Frame {
  Tensor arena;
  std::vector<Tensor> values;
  std::vector<int64_t> words; // of the launches that run
  const std::vector<Value>* of;

  Frame(const std::vector<Value>& described, int64_t arena_bytes, size_t most_words) : values(described.size()), words(most_words), of(&described) {
    constexpr int64_t page = 4096;
    if (arena_bytes) {
      const Tensor pages = at::detail::empty_cpu({arena_bytes + page}, at::kByte);
      const int64_t ahead = -reinterpret_cast<intptr_t>(pages.const_data_ptr()) & (page - 1);
      arena = shown(pages, ahead, at::kByte, {arena_bytes}, {1});
    }
    for (size_t i = 0; i < described.size(); i++)
      if (described[i].kind == Kind::constant)
        set(i, described[i].tensor.detach()); // its own memory, without gradients
      else if (described[i].kind == Kind::arena)
        set(i, in_arena(described[i]));
  }

  Tensor in_arena(const Value& value) const {
    if (!arena.defined())
      return at::detail::empty_strided_cpu(value.shape, value.strides, value.dtype);
    return shown(arena, value.offset, value.dtype, value.shape, value.strides);
  }

  // Put a tensor into a value that is no view, and its views into theirs.
  void set(size_t index, Tensor tensor) {
    const Value& value = (*of)[index];
    for (size_t view : value.views) {
      const Value& v = (*of)[view];
      values[view] = shown(tensor, v.offset, v.dtype, v.shape, v.strides);
    }
    values[index] = std::move(tensor);
  }

  char* address(size_t index) const {
    return static_cast<char*>(values[index].unsafeGetTensorImpl()->mutable_data());
  }

  // Whether a tensor lies in memory that the next call overwrites.
  bool holds(const Tensor& tensor) const {
    return arena.defined() && tensor.has_storage() && tensor.storage().is_alias_of(arena.storage());
  }
};

} // namespace
