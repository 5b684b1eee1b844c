// All steps of one layer in one direction. Grid: the slices of the units, for each group of TILES x ROWS batch rows.
//
// ``gates`` (steps, batch, GATES x HIDDEN) holds the input's part of each gate, and gets the gates' values where they are
// kept for the backward pass; ``states`` (steps, batch, HIDDEN), its rows ``row`` numbers apart, begins as EMPTY.

__device__ __forceinline__ int unit_of(int column) { return TOGETHER ? column / GATES : column % UNITS; }
__device__ __forceinline__ int gate_of(int column) { return TOGETHER ? column % GATES : column / UNITS; }

extern "C" __global__ void BOUNDS recurrent_forward(
    Real* gates, const Real* weights, const Real* bias, const Real* first, const Real* first_cell, Real* states,
    float* cells, Real* part, Real* last, Real* last_cell, i64 steps, i64 batch, i64 row, i64 backwards, i64 keep) {
  const int slice = blockIdx.x % SLICES, unit0 = slice * UNITS;
  const i64 row0 = (i64)(blockIdx.x / SLICES) * TILES * ROWS;
  const int lane = threadIdx.x % 32;
  const Memory m = memory();
  Slice u;
  u.load(m, [&](int owner, int column, int k, int count) {
    const int unit = unit0 + (owner - place().rank) * UNITS + unit_of(column);
    Words words = {{0, 0, 0, 0}};
    if (unit < HIDDEN) {
      const Real* from = weights + ((i64)gate_of(column) * HIDDEN + unit) * HIDDEN + k;
      if (count == 4) words = *(const Words*)from;
      else words.w[0] = *(const unsigned*)from;
    }
    return words;
  });
  Sums sums(m);
  meet_cluster();

  float state[TILES][EACH], cell[TILES][EACH], shift[EACH];
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    const int output = e * THREADS + threadIdx.x, unit = unit0 + output % UNITS;
    const bool exists = output < OUTPUTS && unit < HIDDEN;
    shift[e] = CELL == GRU && bias != nullptr && exists ? widen(bias[unit]) : 0.f;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      const i64 n = row0 + tile * ROWS + output / UNITS;
      const bool there = exists && n < batch;
      state[tile][e] = CELL == GRU && there ? widen(first[n * HIDDEN + unit]) : 0.f;
      cell[tile][e] = CELL == LSTM && there ? widen(first_cell[n * HIDDEN + unit]) : 0.f;
    }
  }

  // The input's part of a tile is asked for a tile ahead, as it may come from memory, and widened where it is needed.
  const auto ask = [&](i64 s, int tile, Bits (&to)[EACH][GATES]) {
    const i64 now = backwards ? steps - 1 - s : s;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int output = e * THREADS + threadIdx.x, unit = unit0 + output % UNITS;
      const i64 n = row0 + tile * ROWS + output / UNITS;
      const bool there = output < OUTPUTS && unit < HIDDEN && n < batch && s < steps;
#pragma unroll
      for (int g = 0; g < GATES; ++g) to[e][g] = there ? gates[((now * batch + n) * GATES + g) * HIDDEN + unit] : Real(0);
    }
  };
  Bits given[EACH][GATES];
  ask(0, 0, given);

  Loads loads;
  int turn = 0;
  for (i64 s = 0; s < steps; ++s) {
    const i64 now = backwards ? steps - 1 - s : s, before = backwards ? now + 1 : now - 1;
    const Real* previous = s ? states + before * batch * row : first;
    const i64 apart = s ? row : HIDDEN;
    const auto source_of = [&](int tile) {
      const i64 most = batch - 1, n0 = row0 + tile * ROWS;
      return [=](int r, int k) { return previous + (n0 + r < most ? n0 + r : most) * apart + k; };
    };
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      const auto source = source_of(tile);
      if (tile == 0) fetch(loads, source);
      product(m, turn, loads, source, s > 0, u, sums, [&] {
        if (tile + 1 < TILES) fetch(loads, source_of(tile + 1));
      });
      // All sums are read and all functions computed before one result is stored, which the compiler may not move. What
      // other blocks wait for is stored first.
      float sum[EACH][GATES], h[EACH], shifted[EACH];
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        const int output = e * THREADS + threadIdx.x;
        if (OUTPUTS % THREADS && output >= OUTPUTS) continue;
        if constexpr (TOGETHER) sums.total(turn, output / UNITS, output % UNITS * GATES, sum[e]);
        else
#pragma unroll
          for (int g = 0; g < GATES; ++g) sum[e][g] = sums.total(turn, output / UNITS, g * UNITS + output % UNITS);
      }
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        float x[GATES];
#pragma unroll
        for (int g = 0; g < GATES; ++g) x[g] = widen((Real)given[e][g]);
        if constexpr (CELL == LSTM) {
          const float in = sigmoid(x[0] + sum[e][0]), forget = sigmoid(x[1] + sum[e][1]);
          const float fresh = hyperbolic_tangent(x[2] + sum[e][2]), out = sigmoid(x[3] + sum[e][3]);
          cell[tile][e] = forget * cell[tile][e] + in * fresh;
          h[e] = out * hyperbolic_tangent(cell[tile][e]);
          sum[e][0] = in, sum[e][1] = forget, sum[e][2] = fresh, sum[e][3] = out;
        } else if constexpr (CELL == GRU) {
          const float reset = sigmoid(x[0] + sum[e][0]), update = sigmoid(x[1] + sum[e][1]);
          shifted[e] = sum[e][2] + shift[e];
          const float fresh = hyperbolic_tangent(x[2] + reset * shifted[e]);
          h[e] = rounded((1.f - update) * fresh + update * state[tile][e]);
          state[tile][e] = h[e];
          sum[e][0] = reset, sum[e][1] = update, sum[e][2] = fresh;
        } else {
          const float z = x[0] + sum[e][0];
          h[e] = CELL == TANH ? hyperbolic_tangent(z) : z > 0.f || z != z ? z : 0.f;
        }
      }
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        const int output = e * THREADS + threadIdx.x, unit = unit0 + output % UNITS;
        if (OUTPUTS % THREADS && output - lane >= OUTPUTS) continue;  // whole warps
        const i64 n = row0 + tile * ROWS + output / UNITS;
        store_together(states + (now * batch + n) * row + unit, h[e], unit < HIDDEN && n < batch);
      }
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        const int output = e * THREADS + threadIdx.x, unit = unit0 + output % UNITS;
        const i64 n = row0 + tile * ROWS + output / UNITS;
        if (output >= OUTPUTS || unit >= HIDDEN || n >= batch) continue;
        if ((CELL == LSTM || CELL == GRU) && keep) {
          Real* to = gates + (now * batch + n) * GATES * HIDDEN + unit;
#pragma unroll
          for (int g = 0; g < GATES; ++g) to[g * HIDDEN] = narrow(sum[e][g]);
          if constexpr (CELL == LSTM) cells[(now * batch + n) * HIDDEN + unit] = cell[tile][e];
          else part[(now * batch + n) * HIDDEN + unit] = narrow(shifted[e]);
        }
        if (s == steps - 1) {
          last[n * HIDDEN + unit] = narrow(h[e]);
          if constexpr (CELL == LSTM) last_cell[n * HIDDEN + unit] = narrow(cell[tile][e]);
        }
      }
      ask(tile + 1 < TILES ? s : s + 1, (tile + 1) % TILES, given);
      turn ^= 1;
    }
  }
  meet_cluster();  // no block ends while another may still read its sums
}
