// The gradients of all steps of one layer in one direction, from the last step to the first. Grid as forward.
//
// ``changes`` (steps, batch, GATES x HIDDEN) gets the gradients of the gates before their functions and begins as EMPTY;
// for a GRU its last third is ``own_changes`` instead where it meets U, and both begin so. ``grad`` is the gradient of the
// states with rows ``row`` numbers apart.

extern "C" __global__ void BOUNDS recurrent_backward(
    const Real* gates, const Real* weights, const Real* states, const float* cells, const Real* part, const Real* first,
    const Real* first_cell, const Real* grad, const Real* grad_last, const Real* grad_last_cell, Real* changes,
    Real* own_changes, Real* grad_first, Real* grad_first_cell, i64 steps, i64 batch, i64 row, i64 grad_row, i64 backwards) {
  const int slice = blockIdx.x % SLICES, unit0 = slice * UNITS;
  const i64 row0 = (i64)(blockIdx.x / SLICES) * TILES * ROWS;
  const int lane = threadIdx.x % 32;
  const Memory m = memory();
  Slice u;
  u.load(m, [&](int owner, int column, int k, int count) {
    const int unit = unit0 + (owner - place().rank) * UNITS + column;
    Words words = {{0, 0, 0, 0}};
    if (unit < HIDDEN) {
      const Real* from = weights + (i64)k * HIDDEN + unit;
#pragma unroll
      for (int w = 0; w < count; ++w) {
        if constexpr (REAL == 0) words.w[w] = bits_of(from[(i64)w * HIDDEN]);
        else words.w[w] = (unsigned)from[(i64)2 * w * HIDDEN] | (unsigned)from[(i64)(2 * w + 1) * HIDDEN] << 16;
      }
    }
    return words;
  });
  Sums sums(m);
  meet_cluster();

  float carry[TILES][EACH], grad_cell[TILES][EACH];  // of the state past the product, and of the cell
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    const int output = e * THREADS + threadIdx.x, unit = unit0 + output % UNITS;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      const i64 n = row0 + tile * ROWS + output / UNITS;
      const bool there = output < OUTPUTS && unit < HIDDEN && n < batch;
      carry[tile][e] = there && grad_last != nullptr ? widen(grad_last[n * HIDDEN + unit]) : 0.f;
      grad_cell[tile][e] = there && CELL == LSTM && grad_last_cell != nullptr ? widen(grad_last_cell[n * HIDDEN + unit]) : 0.f;
    }
  }

  // What was kept of a tile is asked for a tile ahead, as it may come from memory, and widened where it is needed.
  constexpr int KEPT_GATES = CELL == LSTM ? 4 : CELL == GRU ? 3 : 1;
  struct Kept { Real gate[KEPT_GATES], given, extra[2]; float cell[2]; };
  const auto ask = [&](i64 s, int tile, Kept (&to)[EACH]) {
    const i64 now = backwards ? s : steps - 1 - s, before = backwards ? now + 1 : now - 1;
    const bool at_first = s + 1 >= steps;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int output = e * THREADS + threadIdx.x, unit = unit0 + output % UNITS;
      const i64 n = row0 + tile * ROWS + output / UNITS, at = now * batch + n;
      const bool there = output < OUTPUTS && unit < HIDDEN && n < batch && s < steps;
      to[e].given = there ? grad[at * grad_row + unit] : Real(0);
      if constexpr (CELL == LSTM || CELL == GRU) {
#pragma unroll
        for (int g = 0; g < GATES; ++g) to[e].gate[g] = there ? gates[(at * GATES + g) * HIDDEN + unit] : Real(0);
      } else {
        to[e].gate[0] = there ? states[at * row + unit] : Real(0);
      }
      if constexpr (CELL == LSTM) {
        to[e].cell[0] = there ? cells[at * HIDDEN + unit] : 0.f;
        to[e].cell[1] = !there ? 0.f : at_first ? widen(first_cell[n * HIDDEN + unit]) : cells[(before * batch + n) * HIDDEN + unit];
      } else if constexpr (CELL == GRU) {
        to[e].extra[0] = there ? part[at * HIDDEN + unit] : Real(0);
        to[e].extra[1] = !there ? Real(0) : at_first ? first[n * HIDDEN + unit] : states[(before * batch + n) * row + unit];
      }
    }
  };
  Kept known[EACH];
  ask(0, 0, known);

  Loads loads;
  int turn = 0;
  for (i64 s = 0; s <= steps; ++s) {  // the last turn is the gradient of the first state alone
    const i64 now = backwards ? s : steps - 1 - s, after = backwards ? now - 1 : now + 1;
    const auto source_of = [&](int tile) {
      const i64 most = batch - 1, n0 = row0 + tile * ROWS;
      const Real* all = changes + after * batch * GATES * HIDDEN;
      const Real* own = own_changes + after * batch * HIDDEN;
      return [=](int r, int k) {
        const i64 n = n0 + r < most ? n0 + r : most;
        if constexpr (CELL == GRU)
          if (k >= 2 * HIDDEN) return own + n * HIDDEN + (k - 2 * HIDDEN);
        return all + n * GATES * HIDDEN + k;
      };
    };
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      const auto source = source_of(tile);
      if (s > 0) {
        if (tile == 0) fetch(loads, source);
        product(m, turn, loads, source, true, u, sums, [&] {
          if (tile + 1 < TILES) fetch(loads, source_of(tile + 1));
        });
      }
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        const int output = e * THREADS + threadIdx.x, unit = unit0 + output % UNITS;
        if (OUTPUTS % THREADS && output - lane >= OUTPUTS) continue;  // whole warps
        const i64 n = row0 + tile * ROWS + output / UNITS, at = now * batch + n;
        const bool there = unit < HIDDEN && n < batch;
        float dh = carry[tile][e];
        if (s > 0) dh += sums.total(turn, output / UNITS, output % UNITS);
        if (s == steps) {
          if (there) {
            grad_first[n * HIDDEN + unit] = narrow(dh);
            if constexpr (CELL == LSTM) grad_first_cell[n * HIDDEN + unit] = narrow(grad_cell[tile][e]);
          }
          continue;
        }
        dh += widen(known[e].given);
        float kept[KEPT_GATES];
#pragma unroll
        for (int g = 0; g < KEPT_GATES; ++g) kept[g] = widen(known[e].gate[g]);
        carry[tile][e] = 0.f;
        Real* to = changes + at * GATES * HIDDEN + unit;
        if constexpr (CELL == LSTM) {
          const float in = kept[0], forget = kept[1], fresh = kept[2], out = kept[3];
          const float squashed = hyperbolic_tangent(known[e].cell[0]);
          const float dc = grad_cell[tile][e] + dh * out * (1.f - squashed * squashed);
          grad_cell[tile][e] = dc * forget;
          store_together(to, dc * fresh * in * (1.f - in), there);
          store_together(to + HIDDEN, dc * known[e].cell[1] * forget * (1.f - forget), there);
          store_together(to + 2 * HIDDEN, dc * in * (1.f - fresh * fresh), there);
          store_together(to + 3 * HIDDEN, dh * squashed * out * (1.f - out), there);
        } else if constexpr (CELL == GRU) {
          const float reset = kept[0], update = kept[1], fresh = kept[2];
          const float change = dh * (1.f - update) * (1.f - fresh * fresh);
          carry[tile][e] = dh * update;
          store_together(to, change * widen(known[e].extra[0]) * reset * (1.f - reset), there);
          store_together(to + HIDDEN, dh * (widen(known[e].extra[1]) - fresh) * update * (1.f - update), there);
          store_together(own_changes + at * HIDDEN + unit, change * reset, there);
          store_together(to + 2 * HIDDEN, change, there);
        } else {
          const float h = kept[0];
          store_together(to, CELL == TANH ? dh * (1.f - h * h) : h > 0.f ? dh : 0.f, there);
        }
      }
      ask(tile + 1 < TILES ? s : s + 1, (tile + 1) % TILES, known);
      turn ^= 1;
    }
  }
  meet_cluster();  // no block ends while another may still read its sums
}
