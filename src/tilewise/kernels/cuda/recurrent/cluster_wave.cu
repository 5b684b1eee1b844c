// All steps of all layers in one direction: a layer runs behind the one below it, a few steps later. Grid: clusters for each
// SLICE batch rows of the steps of layer 0, of the input's part of layer 1, of the steps of layer 1 and so on. All run at a
// time.
//
// Layers exchange states and the input's part of gates through the tensors that hold them anyway: ``between`` (layers - 1,
// steps, batch, HIDDEN), the states of all layers but the last one, and ``gates`` (layers, steps, batch, GATES x HIDDEN).
// These begin as EMPTY, but for the gates of layer 0. Neither way is waited for from step to step, so that it takes as long
// as it takes only once.

constexpr int MINE = (TERMS + THREADS - 1) / THREADS;  // words of a step's input, of a thread

// The input's part of a layer's gates: ``weights`` (GATES x HIDDEN, HIDDEN) times ``input`` (steps, batch, HIDDEN).
__device__ __forceinline__ void run_inputs(const Memory& m, Slice& w, const Real* weights, const Real* bias, const Real* input,
                                           Real* gates, i64 steps, i64 batch, i64 rows) {
  const int unit0 = place().rank * UNITS;
  w.load(m, [&](int sum, int term) {
    const int unit = unit0 + unit_of(sum);
    Words words = {{0, 0, 0, 0}};
    if (unit < HIDDEN) words = *(const Words*)(weights + ((i64)gate_of(sum) * HIDDEN + unit) * HIDDEN + term);
    return words;
  });
  const auto source = [&](i64 s, int i) -> const Real* {
    const int word = i * THREADS + threadIdx.x, n = word / 4 % ROWS, term = word / 4 / ROWS * CHUNK + word % 4 * WIDE;
    return word < TERMS && n < rows && term < HIDDEN && s < steps ? input + (s * batch + n) * HIDDEN + term : nullptr;
  };
  const auto is_missing_in = [](const Words& a) {
    return a.w[0] == EMPTY || a.w[1] == EMPTY || a.w[2] == EMPTY || a.w[3] == EMPTY;
  };
  const auto ask = [&](i64 s, Words (&to)[MINE]) {
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      to[i] = {{0, 0, 0, 0}};
      if (const Real* from = source(s, i)) to[i] = load_shared_words(from);
    }
  };
  float shift[EACH][GATES];
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    const int output = e * THREADS + threadIdx.x, unit = unit0 + output % UNITS;
    const bool there = bias != nullptr && output < OUTPUTS && unit < HIDDEN;
#pragma unroll
    for (int g = 0; g < GATES; ++g) shift[e][g] = there ? widen(bias[g * HIDDEN + unit]) : 0.f;
  }
  Words given[MINE];
  ask(0, given);
  meet_cluster();
  for (i64 s = 0; s < steps; ++s) {
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      while (is_missing_in(given[i])) {
        given[i] = load_shared_words(source(s, i));
        if (is_missing_in(given[i])) look_again();
      }
      if (i * THREADS + (int)threadIdx.x < TERMS) m.terms[i * THREADS + threadIdx.x] = given[i];
    }
    __syncthreads();  // all terms of this step are there, and all sums of the step before have been read
    ask(s + 1, given);
    multiply_terms(m.terms, w, [&](int tile, int r, const float (&sums)[4]) { put_sums(m.sums, tile, r, sums); });
    __syncthreads();
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int output = e * THREADS + threadIdx.x, unit = unit0 + output % UNITS, n = output / UNITS;
      if (OUTPUTS % THREADS && output - (int)(threadIdx.x % 32) >= OUTPUTS) continue;  // whole warps
      const bool there = unit < HIDDEN && n < rows;
      float sum[GATES] = {};
      if (there) sums_of(m.sums, n, output % UNITS, sum);
#pragma unroll
      for (int g = 0; g < GATES; ++g) {
        const Words all = together(sum[g] + shift[e][g]);
        if (there && leads()) store_shared_words(gates + ((s * batch + n) * GATES + g) * HIDDEN + unit, all);
      }
    }
  }
  meet_cluster();
}

extern "C" __global__ void BOUNDS cluster_wave(
    Real* gates, const Real* u0, const Real* u1, const Real* u2, const Real* u3, const Real* w1, const Real* w2,
    const Real* w3, const Real* own0, const Real* own1, const Real* own2, const Real* own3, const Real* bias1,
    const Real* bias2, const Real* bias3, const Real* first, const Real* first_cell, Real* between, Real* states, float* cells,
    Real* part, Real* last, Real* last_cell, i64 steps, i64 batch, i64 layers, i64 keep) {
  const Part at = part_of(batch);
  const int layer = (int)((at.number + 1) / 2);
  const i64 all = steps * batch, rows = layer * all + at.row0, ends = (layer * batch + at.row0) * HIDDEN;
  const Memory m = memory();
  Slice weights;
  gates += rows * GATES * HIDDEN;
  if (at.number % 2) {
    run_inputs(m, weights, chosen(layer, w1, w1, w2, w3), chosen(layer, bias1, bias1, bias2, bias3),
               between + (rows - all) * HIDDEN, gates, steps, batch, at.rows);
    return;
  }
  Real* to = layer + 1 < layers ? between + rows * HIDDEN : states + at.row0 * HIDDEN;
  const Steps own = {gates, chosen(layer, u0, u1, u2, u3), chosen(layer, own0, own1, own2, own3), first + ends,
                     first_cell + ends, to, cells + rows * HIDDEN, part + rows * HIDDEN, last + ends, last_cell + ends, steps,
                     batch, HIDDEN, at.rows, false, keep != 0};
  if (layer) run_steps<true>(m, weights, own);
  else run_steps<false>(m, weights, own);
}
