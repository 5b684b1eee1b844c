// The gradients of all steps of one layer in all its directions, from the last step to the first. Grid as cluster_forward.
//
// A block has the gradients of its own units' gates, GATES x UNITS terms of every sum. It multiplies them by the weights to
// all units, and sends the sums to the blocks whose units they are: fp32 sums are fewer bytes than gates, and the gates'
// gradients stay where they are made. ``changes`` (directions, steps, batch, GATES x HIDDEN) gets the gradients of the gates
// before their functions, and for a GRU ``own_changes`` (directions, steps, batch, HIDDEN) those of what U gives the third.
// ``grad`` is the gradient of ``states``, with rows ``grad_row`` numbers apart.

constexpr int ROW = UNITS + 4;                  // floats of a batch row of sums
constexpr int PARTS = CLUSTER * WK;             // that a sum is of
constexpr int TURN = PARTS * ROWS * ROW;        // floats of the sums of a turn

// Four numbers in each of the four threads 4 lanes apart, turned: thread i of them gets number i of all.
__device__ __forceinline__ float4 turned(const float (&v)[4]) {
  const bool odd = threadIdx.x & 4, high = threadIdx.x & 8;
  const float a = __shfl_xor_sync(~0u, odd ? v[0] : v[1], 4), b = __shfl_xor_sync(~0u, odd ? v[2] : v[3], 4);
  const float low0 = odd ? a : v[0], low1 = odd ? v[1] : a, up0 = odd ? b : v[2], up1 = odd ? v[3] : b;
  const float c = __shfl_xor_sync(~0u, high ? low0 : up0, 8), d = __shfl_xor_sync(~0u, high ? low1 : up1, 8);
  return high ? make_float4(c, d, up0, up1) : make_float4(low0, low1, c, d);
}

extern "C" __global__ void BOUNDS cluster_backward(
    const Real* gates, const Real* weights, const Real* weights_back, const Real* states, const float* cells,
    const Real* part, const Real* first, const Real* first_cell, const Real* grad, const Real* grad_last,
    const Real* grad_last_cell, Real* changes, Real* own_changes, Real* grad_first, Real* grad_first_cell, i64 steps,
    i64 batch, i64 row, i64 grad_row, i64 backwards) {
  const Part own = part_of(batch);
  const bool back = own.number ? true : backwards != 0;
  const int unit0 = place().rank * UNITS;
  const Memory m = memory();
  Slice u;
  {
    const Real* all = own.number ? weights_back : weights;
    u.load(m, [&](int sum, int term) {
      const int unit = unit0 + term % UNITS;
      Words words = {{0, 0, 0, 0}};
      if (unit < HIDDEN && sum < HIDDEN) {
        const Real* from = all + ((i64)(term / UNITS) * HIDDEN + unit) * HIDDEN + sum;
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          if constexpr (REAL == 0) words.w[w] = bits_of(from[(i64)w * HIDDEN]);
          else words.w[w] = (unsigned)from[(i64)2 * w * HIDDEN] | (unsigned)from[(i64)(2 * w + 1) * HIDDEN] << 16;
        }
      }
      return words;
    });
  }
  Turns turns(m, (unsigned)(PARTS * own.rows * UNITS * 4));
  const i64 rows = own.number * steps * batch + own.row0, ends = (own.number * batch + own.row0) * HIDDEN;
  gates += rows * GATES * HIDDEN, changes += rows * GATES * HIDDEN;
  cells += rows * HIDDEN, part += rows * HIDDEN, own_changes += rows * HIDDEN;
  states += own.row0 * row + own.number * HIDDEN, grad += own.row0 * grad_row + own.number * HIDDEN;
  first += ends, first_cell += ends, grad_first += ends, grad_first_cell += ends;

  // Rows and terms that do not exist stay zero.
  for (int i = threadIdx.x; i < 2 * TERMS; i += THREADS) m.terms[i] = {{0, 0, 0, 0}};
  float carry[EACH], grad_cell[EACH];  // of the state past the product, and of the cell
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    const int output = e * THREADS + threadIdx.x, unit = unit0 + output % UNITS;
    const i64 at = ends + (i64)(output / UNITS) * HIDDEN + unit;
    const bool there = output < OUTPUTS && unit < HIDDEN && output / UNITS < own.rows;
    carry[e] = there && grad_last != nullptr ? widen(grad_last[at]) : 0.f;
    grad_cell[e] = there && CELL == LSTM && grad_last_cell != nullptr ? widen(grad_last_cell[at]) : 0.f;
  }

  // What was kept is asked for a step ahead, as it may come from memory, and widened where it is needed.
  constexpr int KEPT_GATES = CELL == LSTM ? 4 : CELL == GRU ? 3 : 1;
  struct Known { Real gate[KEPT_GATES], given, extra[2]; float cell[2]; };
  const auto ask = [&](i64 s, Known (&to)[EACH]) {
    const i64 now = back ? s : steps - 1 - s, before = back ? now + 1 : now - 1;
    const bool at_first = s + 1 >= steps;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int output = e * THREADS + threadIdx.x, unit = unit0 + output % UNITS;
      const i64 n = output / UNITS, at = now * batch + n;
      const bool there = output < OUTPUTS && unit < HIDDEN && n < own.rows && s < steps;
      to[e].given = there ? grad[at * grad_row + unit] : Real(0);
#pragma unroll
      for (int g = 0; g < KEPT_GATES; ++g) {
        if constexpr (CELL == LSTM || CELL == GRU) to[e].gate[g] = there ? gates[(at * GATES + g) * HIDDEN + unit] : Real(0);
        else to[e].gate[g] = there ? states[at * row + unit] : Real(0);
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
  Known known[EACH];
  ask(0, known);
  __syncthreads();
  meet_cluster();

  for (i64 s = 0; s <= steps; ++s) {  // the last turn is the gradient of the first state alone
    const i64 now = back ? s : steps - 1 - s;
    const int turn = (int)(s & 1);
    Words* terms = m.terms + turn * TERMS;
    if (s > 0) turns.wait(m, turn);
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int output = e * THREADS + threadIdx.x, unit = unit0 + output % UNITS, n = output / UNITS;
      if (OUTPUTS % THREADS && output - (int)(threadIdx.x % 32) >= OUTPUTS) continue;  // whole warps
      const bool there = unit < HIDDEN && n < own.rows;
      float dh = carry[e];
      if (s > 0 && there) {
        const float* from = m.sums + turn * TURN + n * ROW + output % UNITS;
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < PARTS; ++i) sum += from[i * ROWS * ROW];
        dh += sum;
      }
      if (s == steps) {
        if (there) {
          grad_first[n * HIDDEN + unit] = narrow(dh);
          if constexpr (CELL == LSTM) grad_first_cell[n * HIDDEN + unit] = narrow(grad_cell[e]);
        }
        continue;
      }
      dh += widen(known[e].given);
      float kept[KEPT_GATES], change[GATES], own_change = 0.f;
#pragma unroll
      for (int g = 0; g < KEPT_GATES; ++g) kept[g] = widen(known[e].gate[g]);
      carry[e] = 0.f;
      if constexpr (CELL == LSTM) {
        const float in = kept[0], forget = kept[1], fresh = kept[2], out = kept[3];
        const float squashed = hyperbolic_tangent(known[e].cell[0]);
        const float dc = grad_cell[e] + dh * out * (1.f - squashed * squashed);
        grad_cell[e] = dc * forget;
        change[0] = dc * fresh * in * (1.f - in), change[1] = dc * known[e].cell[1] * forget * (1.f - forget);
        change[2] = dc * in * (1.f - fresh * fresh), change[3] = dh * squashed * out * (1.f - out);
      } else if constexpr (CELL == GRU) {
        const float reset = kept[0], update = kept[1], fresh = kept[2];
        change[2] = dh * (1.f - update) * (1.f - fresh * fresh);
        carry[e] = dh * update;
        change[0] = change[2] * widen(known[e].extra[0]) * reset * (1.f - reset);
        change[1] = dh * (widen(known[e].extra[1]) - fresh) * update * (1.f - update);
        own_change = change[2] * reset;
      } else {
        change[0] = CELL == TANH ? dh * (1.f - kept[0] * kept[0]) : kept[0] > 0.f ? dh : 0.f;
      }
      const i64 at = now * batch + n;
#pragma unroll
      for (int g = 0; g < GATES; ++g) {
        const Words all = together(change[g]);
        const bool first_of = there && leads();
        if (first_of) *(Words*)(changes + (at * GATES + g) * HIDDEN + unit) = all;
        if (CELL == GRU && g == 2) {
          const Words by_weights = together(own_change);
          if (first_of) *(Words*)(own_changes + at * HIDDEN + unit) = by_weights;
          if (first_of) terms[place_of(n, g * UNITS + output % UNITS)] = by_weights;
        } else if (first_of) {
          terms[place_of(n, g * UNITS + output % UNITS)] = all;
        }
      }
    }
    if (s == steps) break;
    ask(s + 1, known);
    // All threads have read the sums of this turn when others get what this block sends now.
    __syncthreads();
    multiply_terms(terms, u, [&](int tile, int r, const float (&sums)[4]) {
      const Place at = place();
      const float4 four = turned(sums);
      const int sum = tile * 16 + at.lane / 8 % 2 * 8 + at.lane / 16 * 4, n = r * 8 + at.lane % 4 * 2 + at.lane / 4 % 2;
      const int owner = sum / UNITS;
      if (n >= own.rows) return;
      const float* to = m.sums + (turn ^ 1) * TURN + ((at.rank * WK + at.part) * ROWS + n) * ROW + sum % UNITS;
      send_words(peer_address<CLUSTER>(to, owner), make_uint4(bits_of(four.x), bits_of(four.y), bits_of(four.z), bits_of(four.w)),
                 peer_address<CLUSTER>(m.arrived + (turn ^ 1), owner));
    });
  }
  meet_cluster();  // no block ends while another may still send to it
}
