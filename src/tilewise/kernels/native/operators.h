// The operators tilewise::conv and tilewise::conv_backward, which compiled graphs call.

#pragma once

#include "passes.h"

#include <ATen/Context.h>
#include <torch/library.h>

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>

namespace {

// What the operators tilewise::conv and conv_backward find under a name. All of it is set once.
struct Published {
  PlannedCall* call; // owned
  Ints x_shape, w_shape;
  int64_t bias; // its length, -1 without one
  bool deterministic;
  PyObject* precision; // torch's precision of fp32 operands that the plans are for, owned; null where it does not matter
};

// Everything about operators in this process, which is never taken down. `lock` guards the table.
struct Operators {
  std::shared_mutex lock;
  std::unordered_map<std::string, std::unique_ptr<Published>> table;
  PyObject *conv, *conv_backward, *precision; // the same in Python, and what tells torch's precision now
  std::vector<std::unique_ptr<torch::Library>> libraries;

  const Published* find(const std::string& name) {
    std::shared_lock<std::shared_mutex> held(lock);
    auto found = table.find(name);
    return found == table.end() ? nullptr : found->second.get();
  }
};

Operators& operators() {
  static Operators* all = new Operators();
  return *all;
}

// Whether plans take these operands, as things are now. The interpreter's lock is held.
bool applies(const Published* p, const Tensor& x, const Tensor& w) {
  if (!p || !is_undisturbed() || at::globalContext().deterministicAlgorithms() != p->deterministic || x.sizes() != p->x_shape ||
      w.sizes() != p->w_shape || !fits(x, *p->call->x_strides, p->call->misaligned) || !fits(w, *p->call->w_strides, p->call->misaligned))
    return false;
  if (!p->precision)
    return true;
  Reference now(PyObject_CallNoArgs(operators().precision));
  if (!now.get())
    throw python_error();
  return PyUnicode_Check(now.get()) && PyUnicode_Compare(now.get(), p->precision) == 0;
}

Tensor conv_operator(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b, std::string name) {
  const Published* p = operators().find(name);
  Locked lock;
  const Tensor bias = b.value_or(Tensor());
  if (applies(p, x, w) && (bias.defined() ? bias.numel() : -1) == p->bias) {
    const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
    const c10::OptionalDeviceGuard device(x.device());
    return computed(p->call, x, w, bias);
  }
  Reference plans(PyUnicode_FromStringAndSize(name.data(), static_cast<Py_ssize_t>(name.size())));
  Reference tensors[3] = {wrapped(x), wrapped(w), wrapped(bias)};
  PyObject* arguments[4] = {tensors[0].get(), tensors[1].get(), tensors[2].get(), plans.get()};
  Reference found(PyObject_Vectorcall(operators().conv, arguments, 4, nullptr));
  if (!found.get())
    throw python_error();
  return THPVariable_Unpack(found.get());
}

std::vector<Tensor> conv_backward_operator(const Tensor& dy, const Tensor& x, const Tensor& w, std::string name, c10::List<bool> asked) {
  const Published* p = operators().find(name);
  const Mask mask = {asked[0], asked[1], asked[2]};
  std::vector<Tensor> grads;
  Locked lock;
  if (applies(p, x, w) && fits(dy, *p->call->gradient_strides, p->call->misaligned)) {
    const at::NoGradGuard without_gradients;
    for (Tensor& grad : gradients_by_plans(p->call, dy, x, w, mask))
      if (grad.defined())
        grads.push_back(std::move(grad));
    return grads;
  }
  Reference plans(PyUnicode_FromStringAndSize(name.data(), static_cast<Py_ssize_t>(name.size())));
  Reference flags = flags_of(mask);
  Reference tensors[3] = {wrapped(dy), wrapped(x), wrapped(w)};
  PyObject* arguments[5] = {tensors[0].get(), tensors[1].get(), tensors[2].get(), plans.get(), flags.get()};
  Reference found(PyObject_Vectorcall(operators().conv_backward, arguments, 5, nullptr));
  if (!found.get())
    throw python_error();
  TORCH_CHECK_TYPE(PyList_Check(found.get()), "conv_backward gave no list");
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(found.get()); i++)
    grads.push_back(THPVariable_Unpack(PyList_GET_ITEM(found.get(), i)));
  return grads;
}

// implement(conv, conv_backward, precision, keys): compute the operators at these dispatch keys from now on.
PyObject* implement(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *conv, *conv_backward, *precision, *keys;
  if (!PyArg_ParseTuple(args, "OOOO!:implement", &conv, &conv_backward, &precision, &PyTuple_Type, &keys))
    return nullptr;
  Operators& all = operators();
  TORCH_CHECK(all.libraries.empty(), "the operators are implemented already");
  all.conv = Py_NewRef(conv);
  all.conv_backward = Py_NewRef(conv_backward);
  all.precision = Py_NewRef(precision);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(keys); i++) {
    const char* key = PyUnicode_AsUTF8(PyTuple_GET_ITEM(keys, i));
    if (!key)
      return nullptr;
    auto library = std::make_unique<torch::Library>(torch::Library::IMPL, "tilewise", c10::parseDispatchKey(key), __FILE__, __LINE__);
    library->impl("conv", conv_operator);
    library->impl("conv_backward", conv_backward_operator);
    all.libraries.push_back(std::move(library));
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// publish(name, call, x_shape, w_shape, bias, deterministic, precision): let the operators find a call.
PyObject* publish(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const char* name;
  PyObject *call, *x_shape, *w_shape, *precision;
  long long bias;
  int deterministic;
  if (!PyArg_ParseTuple(args, "sO!OOLpO:publish", &name, &PlannedCallType, &call, &x_shape, &w_shape, &bias, &deterministic, &precision))
    return nullptr;
  auto published = std::make_unique<Published>();
  if (!read_ints(x_shape, published->x_shape) || !read_ints(w_shape, published->w_shape))
    return nullptr;
  published->call = reinterpret_cast<PlannedCall*>(Py_NewRef(call));
  published->bias = bias;
  published->deterministic = deterministic;
  published->precision = precision == Py_None ? nullptr : Py_NewRef(precision);
  std::unique_lock<std::shared_mutex> held(operators().lock);
  operators().table.emplace(name, std::move(published)); // the first one stays: another may be in use
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

} // namespace
