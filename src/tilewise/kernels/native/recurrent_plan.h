// The passes of a planned recurrent layer whose kernels run all steps of a direction in one launch.
//
// What is computed is what StackedLayers computes around GridRecurrence (solvers/recurrent/), with the same operators
// in the same order, so that results have the same bits. States of all directions are written to one tensor at once.

#pragma once

#include "passes.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>

#include <vector>

namespace {

// One kernel over the addresses of its tensors. Without an API it is a function of Python that takes these as numbers.
class Steps {
 public:
  // Read (launches, api, stream, device). Returns false with an error set.
  bool read(PyObject* given) {
    PyObject *launches, *capsule, *stream, *device;
    if (!PyTuple_Check(given) || !PyArg_ParseTuple(given, "OOOO;steps are (launches, api, stream, device)", &launches, &capsule, &stream, &device)) {
      if (!PyErr_Occurred())
        PyErr_Format(PyExc_TypeError, "%R: steps are (launches, api, stream, device)", given);
      return false;
    }
    if (capsule != Py_None && !(api_ = static_cast<const LaunchApi*>(PyCapsule_GetPointer(capsule, LAUNCH_API))))
      return false;
    launches_ = Reference(Py_NewRef(launches));
    capsule_ = Reference(Py_NewRef(capsule));
    stream_ = Reference(Py_NewRef(stream));
    device_ = Reference(Py_NewRef(device));
    return true;
  }

  // Run them. The interpreter's lock is held.
  template <size_t count>
  void operator()(const std::array<uint64_t, count>& addresses) const {
    if (api_) {
      PyObject* device = device_.get();
      const Reference number(PyObject_Vectorcall(stream_.get(), &device, 1, nullptr));
      void* stream = number.get() ? PyLong_AsVoidPtr(number.get()) : nullptr;
      if (PyErr_Occurred() || api_->queue(launches_.get(), stream, addresses.data()))
        throw python_error();
      return;
    }
    std::array<Reference, count> numbers;
    std::array<PyObject*, count> arguments;
    for (size_t i = 0; i < count; i++) {
      numbers[i] = Reference(PyLong_FromUnsignedLongLong(addresses[i]));
      if (!(arguments[i] = numbers[i].get()))
        throw python_error();
    }
    const Reference done(PyObject_Vectorcall(launches_.get(), arguments.data(), count, nullptr));
    if (!done.get())
      throw python_error();
  }

  int traverse(visitproc visit, void* arg) const {
    Py_VISIT(launches_.get());
    return 0;
  }

  void clear() {
    launches_ = Reference();
  }

 private:
  Reference launches_, capsule_, stream_, device_;
  const LaunchApi* api_ = nullptr;
};

struct RecurrentPlan {
  int64_t time = 0, batch = 0, inputs = 0, hidden = 0, layers = 0, directions = 0, gates = 0;
  bool biases = false, lstm = false, gru = false, trains = false;
  bool copies = false; // y is returned as a copy, which a caller may change in place
  at::ScalarType dtype = at::kFloat;
  std::array<Steps, 2> forward, backward; // of each direction

  int64_t ends() const {
    return layers * directions;
  }
  size_t count() const {
    return biases ? 4 : 2; // weights of a direction
  }
  size_t operands() const {
    return 3 + static_cast<size_t>(ends()) * count(); // x, h0, c0 and the weights
  }
};

// What one layer and direction keeps, and where it is among the tensors that are kept.
enum Kept : size_t { GATES, CELLS, PART, OF_DIRECTION };

struct RecurrentResults {
  Tensor y, hn, cn;
  std::vector<Tensor> kept; // OF_DIRECTION of each direction of each layer, then each layer's y, then zeros
};

uint64_t place_of(const Tensor& t) {
  return t.defined() ? reinterpret_cast<uintptr_t>(t.const_data_ptr()) : 0;
}

// Whether a tensor is plain, contiguous, of this size and type, and begins at 16 bytes.
bool is_dense(const RecurrentPlan& p, const Tensor& t, at::IntArrayRef sizes) {
  static const c10::DispatchKeySet usual = c10::autocast_dispatch_keyset | c10::autograd_dispatch_keyset |
      c10::DispatchKeySet({c10::DispatchKey::Dense, c10::DispatchKey::ADInplaceOrView}) |
      c10::DispatchKeySet(c10::DispatchKeySet::RAW, c10::full_backend_mask);
  return !(t.key_set().raw_repr() & ~usual.raw_repr()) && t.scalar_type() == p.dtype && t.sizes() == sizes && t.is_contiguous() &&
      !(place_of(t) & 15);
}

// Whether all operands lie as kernels take them. First states may be undefined.
bool all_dense(const RecurrentPlan& p, const std::vector<Tensor>& operands) {
  const Ints state = {p.ends(), p.batch, p.hidden};
  if (!is_dense(p, operands[0], {p.time, p.batch, p.inputs}) || operands[1].defined() != (p.lstm ? operands[2].defined() : operands[1].defined()))
    return false;
  for (size_t i = 1; i < 3; i++)
    if (operands[i].defined() && !is_dense(p, operands[i], state))
      return false;
  for (size_t i = 3; i < operands.size(); i++) {
    const int64_t direction = static_cast<int64_t>((i - 3) / p.count()), which = static_cast<int64_t>((i - 3) % p.count());
    const int64_t rows = p.gates * p.hidden, columns = direction < p.directions ? p.inputs : p.directions * p.hidden;
    if (which > 1 ? !is_dense(p, operands[i], {rows}) : !is_dense(p, operands[i], {rows, which ? p.hidden : columns}))
      return false;
  }
  return true;
}

// All bits set: kernels tell by them what is not yet written.
void mark_unwritten(const Tensor& t) {
  t.view(t.element_size() == 2 ? at::kShort : at::kInt).fill_(-1);
}

Tensor half_of(const RecurrentPlan& p, const Tensor& t, int64_t direction) {
  return p.directions == 1 ? t : t.narrow(2, direction * p.hidden, p.hidden);
}

// The part of b_hh that kernels add to what U gives the third gate of a GRU.
Tensor bias_n(const RecurrentPlan& p, const Tensor* own) {
  return p.gru && p.biases ? own[3].narrow(0, 2 * p.hidden, p.hidden) : Tensor();
}

Tensor summed_biases(const RecurrentPlan& p, const Tensor* own) {
  if (!p.biases || !p.gru)
    return p.biases ? own[2] + own[3] : Tensor();
  Tensor both = own[2].clone();
  both.narrow(0, 0, 2 * p.hidden).add_(own[3].narrow(0, 0, 2 * p.hidden));
  return both;
}

// The interpreter's lock is held.
RecurrentResults recurrent_results(const RecurrentPlan& p, const std::vector<Tensor>& operands) {
  const at::TensorOptions like = operands[0].options().requires_grad(std::nullopt);
  const bool zero = !operands[1].defined();
  const Tensor zeros = zero ? at::zeros({p.batch, p.hidden}, like) : Tensor();
  const Ints state = {p.ends(), p.batch, p.hidden}, steps = {p.time, p.batch, p.hidden};
  RecurrentResults found{Tensor(), at::empty(state, like), p.lstm ? at::empty(state, like) : Tensor(), {}};
  std::vector<Tensor> outputs;
  Tensor in = operands[0];
  for (int64_t layer = 0; layer < p.layers; layer++) {
    const Tensor y = at::empty({p.time, p.batch, p.directions * p.hidden}, like);
    mark_unwritten(y);
    for (int64_t direction = 0; direction < p.directions; direction++) {
      const int64_t index = layer * p.directions + direction;
      const Tensor* own = &operands[3 + static_cast<size_t>(index) * p.count()];
      const Tensor biases = summed_biases(p, own), n = bias_n(p, own);
      const Tensor gx = at::linear(in.view({p.time * p.batch, in.size(2)}), own[0], biases.defined() ? std::optional<Tensor>(biases) : std::nullopt);
      const Tensor cells = p.lstm && p.trains ? at::empty(steps, like.dtype(at::kFloat)) : Tensor();
      const Tensor part = p.gru && p.trains ? at::empty(steps, like) : Tensor();
      const Tensor h = zero ? zeros : operands[1].select(0, index), c = !p.lstm ? Tensor() : zero ? zeros : operands[2].select(0, index);
      const Tensor last = found.hn.select(0, index), last_cell = p.lstm ? found.cn.select(0, index) : Tensor();
      p.forward[static_cast<size_t>(direction)](std::array<uint64_t, 10>{
          place_of(gx), place_of(own[1]), place_of(n), place_of(h), place_of(c), place_of(half_of(p, y, direction)), place_of(cells),
          place_of(part), place_of(last), place_of(last_cell)});
      if (p.trains)
        found.kept.insert(found.kept.end(), {gx, cells, part});
    }
    outputs.push_back(y);
    in = y;
  }
  found.y = in;
  if (p.trains) {
    found.kept.insert(found.kept.end(), outputs.begin(), outputs.end());
    found.kept.push_back(zeros);
  }
  return found;
}

// The sum over steps of `part` (rows, R), transposed, times the state before the step. Without `h0` that is zero.
Tensor from_states(const RecurrentPlan& p, const Tensor& y, const Tensor& h0, const Tensor& part, bool reverse) {
  const int64_t n = p.batch, rest = (p.time - 1) * n, rows = part.size(0);
  const Tensor at = reverse ? part.narrow(0, rows - n, n) : part.narrow(0, 0, n);
  const Tensor later = reverse ? part.narrow(0, 0, rest) : part.narrow(0, n, rest);
  const Tensor before = y.narrow(0, reverse ? 1 : 0, p.time - 1).reshape({rest, p.hidden});
  if (!h0.defined())
    return rest ? at::matmul(later.t(), before) : at::zeros({part.size(1), p.hidden}, part.options());
  const Tensor product = at::matmul(at.t(), h0);
  return rest ? at::addmm(product, later.t(), before) : product;
}

// The gradients of one direction's weights. `flat` (rows, G*H) are those of its gates, `own` of U_n h of a GRU.
void weight_gradients(const RecurrentPlan& p, const Tensor& in, const Tensor& y, const Tensor& h0, const Tensor& flat, const Tensor& own,
                      bool reverse, const std::vector<bool>& needs, size_t first, variable_list& grads) {
  if (needs[first])
    grads[first] = at::matmul(flat.t(), in.view({flat.size(0), in.size(2)}));
  std::vector<Tensor> parts = {flat};
  if (p.gru)
    parts = {flat.narrow(1, 0, 2 * p.hidden), own};
  if (needs[first + 1]) {
    std::vector<Tensor> products;
    for (const Tensor& part : parts)
      products.push_back(from_states(p, y, h0, part, reverse));
    grads[first + 1] = products.size() == 1 ? products[0] : at::cat(products);
  }
  if (!p.biases || !(needs[first + 2] || needs[first + 3]))
    return;
  std::vector<Tensor> totals;
  for (const Tensor& part : parts)
    totals.push_back(part.sum(0));
  if (needs[first + 2])
    grads[first + 2] = p.gru ? flat.sum(0) : totals[0];
  if (needs[first + 3])
    grads[first + 3] = p.gru ? at::cat(totals) : totals[0].clone();
}

// The gradients that are needed of x, h0, c0 and the weights. `ends` are those of y, hn and cn, undefined for zero.
variable_list recurrent_gradients(const RecurrentPlan& p, const std::vector<Tensor>& operands, const std::vector<Tensor>& kept,
                                  const variable_list& ends, const std::vector<bool>& needs) {
  const at::TensorOptions like = operands[0].options().requires_grad(std::nullopt);
  const Ints state = {p.ends(), p.batch, p.hidden};
  const bool zero = !operands[1].defined();
  const Tensor dh0 = at::empty(state, like), dc0 = p.lstm ? at::empty(state, like) : Tensor();
  const auto dense = [](const Tensor& t) { return t.defined() ? t.contiguous() : t; };
  const Tensor dhn = dense(ends[1]), dcn = p.lstm ? dense(ends[2]) : Tensor();
  Tensor dout = ends[0].defined() ? dense(ends[0]) : at::zeros({p.time, p.batch, p.directions * p.hidden}, like);
  const size_t outputs = static_cast<size_t>(p.ends()) * OF_DIRECTION;
  const int64_t rows = p.time * p.batch, wide = p.gates * p.hidden;
  variable_list grads(operands.size());
  for (int64_t layer = p.layers - 1; layer >= 0; layer--) {
    const Tensor& y = kept[outputs + static_cast<size_t>(layer)];
    const Tensor& in = layer ? kept[outputs + static_cast<size_t>(layer) - 1] : operands[0];
    Tensor dx;
    for (int64_t direction = 0; direction < p.directions; direction++) {
      const int64_t index = layer * p.directions + direction;
      const size_t first = 3 + static_cast<size_t>(index) * p.count(), at = static_cast<size_t>(index) * OF_DIRECTION;
      const Tensor* own = &operands[first];
      const Tensor changes = at::empty({rows * (wide + (p.gru ? p.hidden : 0))}, like);
      mark_unwritten(changes);
      const Tensor flat = changes.narrow(0, 0, rows * wide).view({rows, wide});
      const Tensor of_n = p.gru ? changes.narrow(0, rows * wide, rows * p.hidden).view({rows, p.hidden}) : Tensor();
      const auto state_of = [&](const Tensor& t) { return t.defined() ? t.select(0, index) : t; };
      const Tensor& zeros = kept.back();
      const Tensor h = zero ? zeros : state_of(operands[1]), c = p.lstm && zero ? zeros : state_of(operands[2]);
      const Tensor half = half_of(p, y, direction);
      p.backward[static_cast<size_t>(direction)](std::array<uint64_t, 14>{
          place_of(kept[at + GATES]), place_of(own[1]), place_of(half), place_of(kept[at + CELLS]), place_of(kept[at + PART]), place_of(h),
          place_of(c), place_of(half_of(p, dout, direction)), place_of(state_of(dhn)), place_of(state_of(dcn)), place_of(flat),
          place_of(of_n), place_of(state_of(dh0)), place_of(state_of(dc0))});
      weight_gradients(p, in, half, zero ? Tensor() : h, flat, of_n, direction == 1, needs, first, grads);
      if (layer || needs[0])
        dx = dx.defined() ? at::addmm(dx, flat, own[0]) : at::linear(flat, own[0].t());
    }
    if (dx.defined())
      dout = dx.view(in.sizes());
  }
  if (needs[0])
    grads[0] = dout;
  if (needs[1])
    grads[1] = dh0;
  if (needs[2])
    grads[2] = dc0;
  return grads;
}

} // namespace
