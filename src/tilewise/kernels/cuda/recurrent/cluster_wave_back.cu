// The gradients of all steps of all layers in one direction: a layer runs behind the one above it. Grid: clusters for each
// SLICE batch rows of the steps of the last layer, of the gradient of its input, of the steps of the layer below and so on.
// All run at a time.
//
// Layers exchange gradients through the tensors that hold them anyway: ``changes`` (layers, steps, batch, GATES x HIDDEN), and
// ``between`` (layers - 1, steps, batch, HIDDEN), the gradients of the states of all layers but the last one. Both begin as
// EMPTY, but for the changes of layer 0.

constexpr int MINE = (SLICE * GATES * UNITS / WIDE + THREADS - 1) / THREADS;  // words of a step's terms, of a thread

// The gradient of a layer's input: ``weights`` (GATES x HIDDEN, HIDDEN), turned, times ``changes``. Blocks have terms and send
// sums as in the steps of a layer.
__device__ __forceinline__ void run_input_gradients(const Memory& m, Slice& w, const Real* weights, const Real* changes,
                                                    Real* grad, i64 steps, i64 batch, i64 rows) {
  const int unit0 = place().rank * UNITS;
  load_turned(m, w, weights);
  Turns turns(m, (unsigned)(PARTS * rows * UNITS * 4));
  for (int i = threadIdx.x; i < 2 * TERMS; i += THREADS) m.terms[i] = {{0, 0, 0, 0}};
  struct Term { int n, term; const Real* from; };  // of a word; from nowhere where there is none
  const auto term_of = [&](i64 s, int i) -> Term {
    const int number = (i * THREADS + threadIdx.x) * WIDE, term = number % (GATES * UNITS), n = number / (GATES * UNITS);
    const int unit = unit0 + term % UNITS;
    const bool there = n < rows && unit < HIDDEN && s < steps;
    return {n, term, there ? changes + (((steps - 1 - s) * batch + n) * GATES + term / UNITS) * HIDDEN + unit : nullptr};
  };
  const auto is_missing_in = [](const Words& a) {
    return a.w[0] == EMPTY || a.w[1] == EMPTY || a.w[2] == EMPTY || a.w[3] == EMPTY;
  };
  const auto ask = [&](i64 s, Words (&to)[MINE]) {
#pragma unroll
    for (int i = 0; i < MINE; ++i)
      if (const Real* from = term_of(s, i).from) to[i] = load_shared_words(from);
  };
  Words given[MINE];
  ask(0, given);
  __syncthreads();
  meet_cluster();
  for (i64 s = 0; s <= steps; ++s) {  // the last turn has the sums of the first step alone
    const int turn = (int)(s & 1);
    if (s > 0) {
      turns.wait(m, turn);
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        const int output = e * THREADS + threadIdx.x, unit = unit0 + output % UNITS, n = output / UNITS;
        if (OUTPUTS % THREADS && output - (int)(threadIdx.x % 32) >= OUTPUTS) continue;  // whole warps
        const bool there = unit < HIDDEN && n < rows;
        const Words all = together(there ? total_of(m, turn, n, output % UNITS) : 0.f);
        if (there && leads()) store_shared_words(grad + ((steps - s) * batch + n) * HIDDEN + unit, all);
      }
    }
    if (s == steps) break;
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      const Term at = term_of(s, i);
      if (at.from == nullptr) continue;
      while (is_missing_in(given[i])) {
        given[i] = load_shared_words(at.from);
        if (is_missing_in(given[i])) look_again();
      }
      m.terms[turn * TERMS + place_of(at.n, at.term)] = given[i];
    }
    ask(s + 1, given);
    // All threads have read the sums of this turn when others get what this block sends now.
    __syncthreads();
    multiply_and_send(m, turn, w, rows);
  }
  meet_cluster();
}

extern "C" __global__ void BOUNDS cluster_wave_back(
    const Real* gates, const Real* u0, const Real* u1, const Real* u2, const Real* u3, const Real* w1, const Real* w2,
    const Real* w3, const Real* below, const Real* states, const float* cells, const Real* part, const Real* first,
    const Real* first_cell, const Real* grad, const Real* grad_last, const Real* grad_last_cell, Real* between, Real* changes,
    Real* own_changes, Real* grad_first, Real* grad_first_cell, i64 steps, i64 batch, i64 layers, i64 grad_row) {
  const Part at = part_of(batch);
  const int layer = (int)(layers - 1 - at.number / 2);
  const bool is_last = layer + 1 == layers;
  const i64 all = steps * batch, rows = layer * all + at.row0, ends = (layer * batch + at.row0) * HIDDEN;
  const Memory m = memory();
  Slice weights;
  changes += rows * GATES * HIDDEN;
  if (at.number % 2) {
    run_input_gradients(m, weights, chosen(layer, w1, w1, w2, w3), changes, between + (rows - all) * HIDDEN, steps, batch,
                        at.rows);
    return;
  }
  const BackSteps own = {
      gates + rows * GATES * HIDDEN, chosen(layer, u0, u1, u2, u3),
      is_last ? states + at.row0 * HIDDEN : below + rows * HIDDEN, cells + rows * HIDDEN, part + rows * HIDDEN, first + ends,
      first_cell + ends, is_last ? grad + at.row0 * grad_row : between + rows * HIDDEN, offset(grad_last, ends),
      offset(grad_last_cell, ends), changes, own_changes + rows * HIDDEN, grad_first + ends, grad_first_cell + ends, steps,
      batch, HIDDEN, is_last ? grad_row : HIDDEN, at.rows, false};
  if (is_last) run_back_steps<false>(m, weights, own);
  else run_back_steps<true>(m, weights, own);
}
