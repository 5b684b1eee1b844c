// Unchanged: whether tensors lie where they lay, as they were, and dictionaries hold what they held.
//
// A network has hundreds of tensors, and a call of it drives them out of the caches. So what is compared later is asked
// for ahead, and what is compared with lies in one piece of memory.

#pragma once

#include "step_values.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace {

constexpr size_t AHEAD = 12; // entries between what is asked for and what is compared

// A tensor as it was: its memory, shape, type, and how operators on it are dispatched in this thread's state.
struct Lying {
  THPObjectPtr object;
  PyTypeObject* type;
  const void* data;
  uint64_t keys;
  size_t first; // where its sizes begin among those of all, which its strides follow
  int64_t version; // -1 for one without a counter
  uint32_t dims;
  at::ScalarType dtype;
  bool needs_gradient;

  static uint64_t keys_of(const Tensor& t) {
    const c10::impl::LocalDispatchKeySet state = c10::impl::tls_local_dispatch_key_set();
    return ((t.key_set() | state.included_) - state.excluded_).raw_repr();
  }
  static int64_t version_of(const Tensor& t) {
    return t.is_inference() ? -1 : static_cast<int64_t>(t._version());
  }
  Lying(PyObject* given, Ints& sizes) : object(Py_NewRef(given)), type(Py_TYPE(given)), first(sizes.size()) {
    TORCH_CHECK_TYPE(THPVariable_Check(given), "a ", type->tp_name, " is given: a tensor would do");
    const Tensor& t = THPVariable_Unpack(given);
    TORCH_CHECK_TYPE(t.layout() == at::kStrided, "a tensor that is not strided is given");
    data = t.const_data_ptr();
    keys = keys_of(t);
    dtype = t.scalar_type();
    dims = static_cast<uint32_t>(t.dim());
    sizes.insert(sizes.end(), t.sizes().begin(), t.sizes().end());
    sizes.insert(sizes.end(), t.strides().begin(), t.strides().end());
    needs_gradient = t.requires_grad();
    version = version_of(t);
  }
  bool lies(const Ints& sizes) {
    const Tensor& t = THPVariable_Unpack(object.get());
    const at::IntArrayRef shape(sizes.data() + first, dims), strides(sizes.data() + first + dims, dims);
    return Py_TYPE(object.get()) == type && t.const_data_ptr() == data && keys_of(t) == keys && t.scalar_type() == dtype && t.sizes() == shape && t.strides() == strides && t.requires_grad() == needs_gradient;
  }
  void ask() {
    __builtin_prefetch(object.get());
  }
  // Of an object that was asked for before.
  void ask_within() {
    const char* within = reinterpret_cast<const char*>(THPVariable_Unpack(object.get()).unsafeGetTensorImpl());
    for (size_t line = 0; line < sizeof(c10::TensorImpl); line += 64)
      __builtin_prefetch(within + line);
  }
  bool same_version() {
    return version_of(THPVariable_Unpack(object.get())) == version;
  }
};

// A dictionary as it was. CPython before 3.12 counts its changes; of others only the number of entries is known.
struct Counted {
  THPObjectPtr object;
  uint64_t version;

  static uint64_t version_of(PyObject* dict) {
#if PY_VERSION_HEX < 0x030C0000
    return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
#else
    return static_cast<uint64_t>(PyDict_GET_SIZE(dict));
#endif
  }
  explicit Counted(PyObject* given) : object(Py_NewRef(given)) {
    TORCH_CHECK_TYPE(PyDict_Check(given), "a ", Py_TYPE(given)->tp_name, " is given: a dictionary would do");
    version = version_of(given);
  }
};

struct Noted {
  Ints sizes;
  std::vector<Lying> tensors;
  std::vector<Counted> dicts;
};

struct Unchanged {
  PyObject_HEAD
  Noted* noted;
};

PyObject* unchanged_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  PyObject *tensors, *dicts;
  if ((kwargs && PyDict_GET_SIZE(kwargs)) || !PyArg_ParseTuple(args, "O!O!", &PyTuple_Type, &tensors, &PyTuple_Type, &dicts))
    return nullptr;
  auto noted = std::make_unique<Noted>();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); i++)
    noted->tensors.emplace_back(PyTuple_GET_ITEM(tensors, i), noted->sizes);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(dicts); i++)
    noted->dicts.emplace_back(PyTuple_GET_ITEM(dicts, i));
  Unchanged* self = reinterpret_cast<Unchanged*>(type->tp_alloc(type, 0));
  if (!self)
    return nullptr;
  self->noted = noted.release();
  return reinterpret_cast<PyObject*>(self);
  END_HANDLE_TH_ERRORS
}

PyObject* unchanged_holds(PyObject* object, PyObject*) {
  HANDLE_TH_ERRORS
  Noted* noted = reinterpret_cast<Unchanged*>(object)->noted;
  std::vector<Counted>& dicts = noted->dicts;
  std::vector<Lying>& tensors = noted->tensors;
  const size_t count = dicts.size(), total = tensors.size();
  for (size_t i = 0; i < count && i < AHEAD; i++)
    __builtin_prefetch(dicts[i].object.get());
  bool holds = true;
  for (size_t i = 0; holds && i < count; i++) {
    if (i + AHEAD < count)
      __builtin_prefetch(dicts[i + AHEAD].object.get());
    holds = Counted::version_of(dicts[i].object.get()) == dicts[i].version;
  }
  for (size_t i = 0; i < total && i < 2 * AHEAD; i++)
    tensors[i].ask();
  for (size_t i = 0; holds && i < total; i++) {
    if (i + 2 * AHEAD < total)
      tensors[i + 2 * AHEAD].ask();
    if (i + AHEAD < total)
      tensors[i + AHEAD].ask_within();
    holds = tensors[i].lies(noted->sizes);
  }
  return PyBool_FromLong(holds);
  END_HANDLE_TH_ERRORS
}

PyObject* unchanged_same_versions(PyObject* object, PyObject*) {
  HANDLE_TH_ERRORS
  Noted* noted = reinterpret_cast<Unchanged*>(object)->noted;
  bool same = true;
  for (size_t i = 0; same && i < noted->tensors.size(); i++)
    same = noted->tensors[i].same_version();
  return PyBool_FromLong(same);
  END_HANDLE_TH_ERRORS
}

int unchanged_traverse(PyObject* object, visitproc visit, void* arg) {
  if (Noted* noted = reinterpret_cast<Unchanged*>(object)->noted) {
    for (Lying& each : noted->tensors)
      Py_VISIT(each.object.get());
    for (Counted& each : noted->dicts)
      Py_VISIT(each.object.get());
  }
  return 0;
}

int unchanged_clear(PyObject* object) {
  delete std::exchange(reinterpret_cast<Unchanged*>(object)->noted, new Noted());
  return 0;
}

void unchanged_dealloc(PyObject* object) {
  PyObject_GC_UnTrack(object);
  delete std::exchange(reinterpret_cast<Unchanged*>(object)->noted, nullptr);
  Py_TYPE(object)->tp_free(object);
}

PyMethodDef unchanged_methods[] = {
    {"holds", unchanged_holds, METH_NOARGS, "Whether all tensors lie as they lay, and no dictionary has changed."},
    {"same_versions", unchanged_same_versions, METH_NOARGS, "Whether no tensor has been written to, as far as torch counts it."},
    {nullptr, nullptr, 0, nullptr},
};

PyTypeObject UnchangedType = [] {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = "program_call.Unchanged";
  type.tp_doc = "Unchanged(tensors, dicts): these as they are now, to compare with later.";
  type.tp_basicsize = sizeof(Unchanged);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
  type.tp_new = unchanged_new;
  type.tp_dealloc = unchanged_dealloc;
  type.tp_traverse = unchanged_traverse;
  type.tp_clear = unchanged_clear;
  type.tp_methods = unchanged_methods;
  return type;
}();

} // namespace
