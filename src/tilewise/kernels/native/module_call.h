// ModuleCall: a call of a module that is like the one before it, recognised and run without Python.
//
// Between a call of a convolution, or of a linear layer, and what runs it lie some forty questions: is the module still torch's own, are its
// arguments the same, do the tensors look as before, are torch's flags the same. Python asks them in some 10 us in a
// network, whose objects are not in the caches. Here the answers of one call are kept and compared. Whatever differs
// is left to Python, which asks again, and makes a new ModuleCall where it finds another answer.

#pragma once

#include "passes.h"

#include <ATen/Context.h>
#include <ATen/ops/conv1d.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/conv3d.h>
#include <ATen/ops/linear.h>

#include <pybind11/gil.h>

#include <array>
#include <memory>

namespace {

// What is compared of a tensor: all but its numbers.
struct Likeness {
  PyTypeObject* type = nullptr; // borrowed from the tensor that was seen: torch's own types, or those of an `owner`
  Reference owner;
  uint64_t keys = 0; // what the dispatcher sees, with what this thread includes and excludes
  at::ScalarType dtype = at::kFloat;
  c10::Device device = at::kCPU;
  bool requires_grad = false;
  Ints sizes, strides;

  static uint64_t keys_of(const Tensor& t) {
    const c10::impl::LocalDispatchKeySet thread = c10::impl::tls_local_dispatch_key_set();
    return ((t.key_set() | thread.included_) - thread.excluded_).raw_repr();
  }

  void see(PyObject* tensor) {
    const Tensor& t = THPVariable_Unpack(tensor);
    type = Py_TYPE(tensor);
    owner = Reference(Py_NewRef(reinterpret_cast<PyObject*>(type)));
    keys = keys_of(t);
    dtype = t.scalar_type();
    device = t.device();
    requires_grad = t.requires_grad();
    sizes = t.sizes().vec();
    strides = t.strides().vec();
  }

  bool has(PyObject* tensor) const {
    if (Py_TYPE(tensor) != type)
      return false;
    const Tensor& t = THPVariable_Unpack(tensor);
    return keys_of(t) == keys && t.scalar_type() == dtype && t.device() == device && t.requires_grad() == requires_grad &&
        t.sizes() == c10::IntArrayRef(sizes) && t.strides() == c10::IntArrayRef(strides);
  }
};

// A value that must be the same: that of a name in a dictionary.
struct Named {
  Reference dictionary, name, value;

  bool holds() const {
    return PyDict_GetItemWithError(dictionary.get(), name.get()) == value.get();
  }
};

struct Seen {
  // The class: no attribute of it or of those above it has changed while it has this version, which is never 0.
  Reference kind;
  unsigned version = 0;
  std::array<Reference, 2> functions, codes; // its methods, whose code can be exchanged
  // The module's own attributes.
  Reference arguments; // ((name, value), ...)
  Reference absent;    // names that it must not have
  Named installed, level;
  // The layer's latest entry, which Python sets and takes away.
  Reference layer, latest, entry;
  // The call.
  std::array<Likeness, 3> tensors; // input, weight, bias
  bool has_bias = false, grad = false, deterministic = false;
  Reference precision, precision_now; // torch's precision of fp32 operands, and what tells it now; or null
  int64_t autocast = -1;              // the dtype to which autocast casts, or -1
  // What runs it: run(x, w, b), or torch's own function.
  Reference run;
  Geometry by_torch;
  bool linear = false; // torch's own function is that of a linear layer
};

struct ModuleCall {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  Seen* seen;
};

PyObject *parameters_name, *weight_name, *bias_name;

// Whether the class, and the function that it calls, are as they were.
bool is_same_code(const Seen& s, PyObject* module) {
  PyTypeObject* kind = reinterpret_cast<PyTypeObject*>(s.kind.get());
  if (Py_TYPE(module) != kind || kind->tp_version_tag != s.version || !s.installed.holds() || !s.level.holds())
    return false;
  for (size_t i = 0; i < s.functions.size(); i++)
    if (PyFunction_GET_CODE(s.functions[i].get()) != s.codes[i].get())
      return false;
  return true;
}

// Whether the module's own attributes are as they were. -1 with an error set.
int has_same_arguments(const Seen& s, PyObject* attributes) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(s.absent.get()); i++)
    if (const int found = PyDict_Contains(attributes, PyTuple_GET_ITEM(s.absent.get(), i)))
      return found < 0 ? -1 : 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(s.arguments.get()); i++) {
    PyObject* pair = PyTuple_GET_ITEM(s.arguments.get(), i);
    PyObject* now = PyDict_GetItemWithError(attributes, PyTuple_GET_ITEM(pair, 0));
    if (now == PyTuple_GET_ITEM(pair, 1))
      continue;
    const int same = now ? PyObject_RichCompareBool(now, PyTuple_GET_ITEM(pair, 1), Py_EQ) : PyErr_Occurred() ? -1 : 0;
    if (same != 1)
      return same;
  }
  return 1;
}

// Whether the layer still has the entry that this was made for. -1 with an error set.
int is_latest(const Seen& s) {
  Reference now(PyObject_GetAttr(s.layer.get(), s.latest.get()));
  return now.get() ? now.get() == s.entry.get() : -1;
}

// Whether torch is set as it was. -1 with an error set.
int has_same_settings(const Seen& s, const Tensor& x) {
  if (at::impl::torch_function_mode_enabled() || at::GradMode::is_enabled() != s.grad ||
      at::globalContext().deterministicAlgorithms() != s.deterministic)
    return 0;
  if (s.autocast >= 0 && at::autocast::get_autocast_dtype(x.device().type()) != static_cast<at::ScalarType>(s.autocast))
    return 0;
  if (!s.precision.get())
    return 1;
  Reference now(PyObject_CallNoArgs(s.precision_now.get()));
  return now.get() ? PyObject_RichCompareBool(now.get(), s.precision.get(), Py_EQ) : -1;
}

// Whether tensors look as they did, and lie where kernels can read them.
bool look_the_same(const Seen& s, PyObject* const tensors[3]) {
  if (s.has_bias != (tensors[2] != Py_None))
    return false;
  for (size_t i = 0; i < (s.has_bias ? 3 : 2); i++)
    if (!s.tensors[i].has(tensors[i]))
      return false;
  const auto place = [](PyObject* t) { return reinterpret_cast<uintptr_t>(THPVariable_Unpack(t).const_data_ptr()); };
  return !((place(tensors[0]) | place(tensors[1])) & 15);
}

PyObject* by_torch(const Seen& s, PyObject* const tensors[3]) {
  const Geometry& g = s.by_torch;
  const Tensor &x = THPVariable_Unpack(tensors[0]), &w = THPVariable_Unpack(tensors[1]);
  const std::optional<Tensor> b = tensors[2] == Py_None ? std::nullopt : std::optional<Tensor>(THPVariable_Unpack(tensors[2]));
  Tensor y;
  {
    const pybind11::gil_scoped_release unlocked;
    y = s.linear               ? at::linear(x, w, b)
        : g.stride.size() == 1 ? at::conv1d(x, w, b, g.stride, g.padding, g.dilation, g.groups)
        : g.stride.size() == 2 ? at::conv2d(x, w, b, g.stride, g.padding, g.dilation, g.groups)
                               : at::conv3d(x, w, b, g.stride, g.padding, g.dilation, g.groups);
  }
  return THPVariable_Wrap(y);
}

// call(module, input): the result, or None where the call is not as the one that was seen.
PyObject* module_call(PyObject* object, PyObject* const* arguments, size_t flags, PyObject* names) {
  HANDLE_TH_ERRORS
  const Seen& s = *reinterpret_cast<ModuleCall*>(object)->seen;
  TORCH_CHECK_TYPE(PyVectorcall_NARGS(flags) == 2 && !names, "a module's call takes the module and its input");
  PyObject* module = arguments[0];
  if (!s.entry.get() || !is_same_code(s, module))
    return Py_NewRef(Py_None);
  Reference attributes(PyObject_GenericGetDict(module, nullptr));
  if (!attributes.get())
    return nullptr;
  int same = has_same_arguments(s, attributes.get());
  if (same == 1)
    same = is_latest(s);
  PyObject* parameters = same == 1 ? PyDict_GetItemWithError(attributes.get(), parameters_name) : nullptr;
  if (same != 1 || !parameters || !PyDict_Check(parameters))
    return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None);
  PyObject* const tensors[3] = {arguments[1], PyDict_GetItemWithError(parameters, weight_name), PyDict_GetItemWithError(parameters, bias_name)};
  if (!tensors[1] || !tensors[2] || !look_the_same(s, tensors))
    return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None);
  same = has_same_settings(s, THPVariable_Unpack(tensors[0]));
  if (same != 1)
    return same < 0 ? nullptr : Py_NewRef(Py_None);
  return s.run.get() ? PyObject_Vectorcall(s.run.get(), tensors, 3, nullptr) : by_torch(s, tensors);
  END_HANDLE_TH_ERRORS
}

// --- Making one ------------------------------------------------------------------------------------------------------

// Read (dictionary, name): what stands there now must stay.
bool read_named(PyObject* given, Named& into) {
  PyObject *dictionary, *name;
  if (!PyArg_ParseTuple(given, "O!U;a name is given as (dictionary, name)", &PyDict_Type, &dictionary, &name))
    return false;
  PyObject* value = PyDict_GetItemWithError(dictionary, name);
  if (!value) {
    if (!PyErr_Occurred())
      PyErr_SetObject(PyExc_KeyError, name);
    return false;
  }
  into.dictionary = Reference(Py_NewRef(dictionary));
  into.name = Reference(Py_NewRef(name));
  into.value = Reference(Py_NewRef(value));
  return true;
}

// Read the class and its two methods. Returns false with an error set: RuntimeError where the class has no version.
bool read_class(PyObject* kind, PyObject* methods, Seen& into) {
  PyObject* functions[2];
  if (!PyArg_ParseTuple(methods, "O!O!;methods are two functions", &PyFunction_Type, &functions[0], &PyFunction_Type, &functions[1]))
    return false;
  Reference looked_up(PyObject_GetAttrString(kind, "forward")); // which gives the class a version
  if (!looked_up.get())
    return false;
  into.kind = Reference(Py_NewRef(kind));
  into.version = reinterpret_cast<PyTypeObject*>(kind)->tp_version_tag;
  for (size_t i = 0; i < 2; i++) {
    into.functions[i] = Reference(Py_NewRef(functions[i]));
    into.codes[i] = Reference(Py_NewRef(PyFunction_GET_CODE(functions[i])));
  }
  if (!into.version)
    PyErr_SetString(PyExc_RuntimeError, "Python has no version left for the class");
  return into.version;
}

bool read_settings(PyObject* given, Seen& into) {
  int grad, deterministic;
  long long autocast;
  PyObject *precision, *now;
  if (!PyArg_ParseTuple(given, "ppLOO;settings are five", &grad, &deterministic, &autocast, &precision, &now))
    return false;
  into.grad = grad;
  into.deterministic = deterministic;
  into.autocast = autocast;
  into.precision = precision == Py_None ? Reference() : Reference(Py_NewRef(precision));
  into.precision_now = Reference(Py_NewRef(now));
  return true;
}

bool read_tensors(PyObject* given, Seen& into) {
  for (Py_ssize_t i = 0; i < 3; i++) {
    PyObject* tensor = PyTuple_Check(given) && PyTuple_GET_SIZE(given) == 3 ? PyTuple_GET_ITEM(given, i) : nullptr;
    if (tensor && THPVariable_Check(tensor)) {
      into.tensors[static_cast<size_t>(i)].see(tensor);
      into.has_bias = i == 2;
    } else if (i < 2 || tensor != Py_None) {
      PyErr_Format(PyExc_TypeError, "tensors=%R: an input, a weight, and a bias or None would do", given);
      return false;
    }
  }
  return true;
}

bool read_geometry(PyObject* given, Geometry& into) {
  PyObject* sides[3];
  long long groups;
  if (!PyTuple_GET_SIZE(given))
    return true; // of a linear layer
  if (!PyArg_ParseTuple(given, "OOOL;a geometry is stride, padding, dilation and groups", &sides[0], &sides[1], &sides[2], &groups))
    return false;
  into.groups = groups;
  return read_ints(sides[0], into.stride) && read_ints(sides[1], into.padding) && read_ints(sides[2], into.dilation);
}

bool read_pairs(PyObject* given) {
  bool right = PyTuple_Check(given);
  for (Py_ssize_t i = 0; right && i < PyTuple_GET_SIZE(given); i++)
    right = PyTuple_Check(PyTuple_GET_ITEM(given, i)) && PyTuple_GET_SIZE(PyTuple_GET_ITEM(given, i)) == 2;
  if (!right)
    PyErr_Format(PyExc_TypeError, "arguments=%R: pairs of name and value would do", given);
  return right;
}

PyObject* module_call_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  static const char* names[] = {"kind", "methods", "installed", "level", "absent", "arguments", "layer", "latest", "entry",
                                "tensors", "settings", "run", "geometry", nullptr};
  PyObject *kind, *methods, *installed, *level, *absent, *arguments, *layer, *latest, *entry, *tensors, *settings, *run, *geometry;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!O!O!OOUOOO!OO!:ModuleCall", const_cast<char**>(names), &PyType_Type, &kind,
                                   &PyTuple_Type, &methods, &PyTuple_Type, &installed, &PyTuple_Type, &level, &PyTuple_Type,
                                   &absent, &arguments, &layer, &latest, &entry, &tensors, &PyTuple_Type, &settings, &run,
                                   &PyTuple_Type, &geometry))
    return nullptr;
  auto seen = std::make_unique<Seen>();
  if (!read_class(kind, methods, *seen) || !read_named(installed, seen->installed) || !read_named(level, seen->level) ||
      !read_pairs(arguments) || !read_tensors(tensors, *seen) || !read_settings(settings, *seen) ||
      !read_geometry(geometry, seen->by_torch))
    return nullptr;
  seen->linear = !PyTuple_GET_SIZE(geometry);
  seen->absent = Reference(Py_NewRef(absent));
  seen->arguments = Reference(Py_NewRef(arguments));
  seen->layer = Reference(Py_NewRef(layer));
  seen->latest = Reference(Py_NewRef(latest));
  seen->entry = Reference(Py_NewRef(entry));
  seen->run = run == Py_None ? Reference() : Reference(Py_NewRef(run));
  ModuleCall* self = reinterpret_cast<ModuleCall*>(type->tp_alloc(type, 0));
  if (!self)
    return nullptr;
  self->vectorcall = module_call;
  self->seen = seen.release();
  return reinterpret_cast<PyObject*>(self);
  END_HANDLE_TH_ERRORS
}

int module_call_traverse(PyObject* object, visitproc visit, void* arg) {
  if (const Seen* s = reinterpret_cast<ModuleCall*>(object)->seen) {
    Py_VISIT(s->layer.get());
    Py_VISIT(s->entry.get());
    Py_VISIT(s->run.get());
  }
  return 0;
}

// Break circles. It answers None from then on.
int module_call_clear(PyObject* object) {
  if (Seen* s = reinterpret_cast<ModuleCall*>(object)->seen) {
    const Reference entry = std::move(s->entry), layer = std::move(s->layer), run = std::move(s->run);
  }
  return 0;
}

void module_call_dealloc(PyObject* object) {
  PyObject_GC_UnTrack(object);
  delete reinterpret_cast<ModuleCall*>(object)->seen;
  Py_TYPE(object)->tp_free(object);
}

PyTypeObject ModuleCallType = [] {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = "planned_call.ModuleCall";
  type.tp_doc = "ModuleCall(kind, methods, installed, level, absent, arguments, layer, latest, entry, tensors, settings, run, geometry)";
  type.tp_basicsize = sizeof(ModuleCall);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL;
  type.tp_vectorcall_offset = offsetof(ModuleCall, vectorcall);
  type.tp_call = PyVectorcall_Call;
  type.tp_new = module_call_new;
  type.tp_dealloc = module_call_dealloc;
  type.tp_traverse = module_call_traverse;
  type.tp_clear = module_call_clear;
  return type;
}();

} // namespace
