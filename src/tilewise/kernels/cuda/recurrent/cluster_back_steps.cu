// The gradients of all steps of a direction of a layer, from the last step to the first, for the batch rows of a cluster.
// Kernels that run it for several directions or layers are in files of their own.
//
// A block has the gradients of its own units' gates, GATES x UNITS terms of every sum. It multiplies them by the weights to
// all units, and sends the sums to the blocks whose units they are: fp32 sums are fewer bytes than gates, and the gates'
// gradients stay where they are made.

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

// Weights (GATES x HIDDEN, HIDDEN) of the gates of a block's own units, for all sums.
__device__ __forceinline__ void load_turned(const Memory& m, Slice& u, const Real* all) {
  const int unit0 = place().rank * UNITS;
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

// The product of a block's own terms of a turn, sent to the blocks whose sums they are.
__device__ __forceinline__ void multiply_and_send(const Memory& m, int turn, const Slice& u, i64 rows) {
  multiply_terms(m.terms + turn * TERMS, u, [&](int tile, int r, const float (&sums)[4]) {
    const Place at = place();
    const float4 four = turned(sums);
    const int sum = tile * 16 + at.lane / 8 % 2 * 8 + at.lane / 16 * 4, n = r * 8 + at.lane % 4 * 2 + at.lane / 4 % 2;
    const int owner = sum / UNITS;
    if (n >= rows) return;
    const float* to = m.sums + (turn ^ 1) * TURN + ((at.rank * WK + at.part) * ROWS + n) * ROW + sum % UNITS;
    send_words(peer_address<CLUSTER>(to, owner), make_uint4(bits_of(four.x), bits_of(four.y), bits_of(four.z), bits_of(four.w)),
               peer_address<CLUSTER>(m.arrived + (turn ^ 1), owner));
  });
}

// A sum of all parts that came for a turn.
__device__ __forceinline__ float total_of(const Memory& m, int turn, int row, int unit) {
  const float* from = m.sums + turn * TURN + row * ROW + unit;
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < PARTS; ++i) sum += from[i * ROWS * ROW];
  return sum;
}

// What a cluster reads and writes, from its own first batch row on. Of a batch row ``changes``, GATES x HIDDEN, gets the
// gradients of the gates before their functions, and for a GRU ``own_changes``, HIDDEN, those of what U gives the third.
// ``grad`` is the gradient of ``states``; their rows are ``grad_row`` and ``row`` numbers apart.
struct BackSteps {
  const Real *gates, *weights, *states;
  const float* cells;
  const Real *part, *first, *first_cell, *grad, *grad_last, *grad_last_cell;
  Real *changes, *own_changes, *grad_first, *grad_first_cell;
  i64 steps, batch, row, grad_row, rows;
  bool back;
};

// EXCHANGED: another cluster writes ``grad`` meanwhile, which is EMPTY at first.
template <bool EXCHANGED> __device__ __forceinline__ void run_back_steps(const Memory& m, Slice& u, const BackSteps& own) {
  const i64 steps = own.steps, batch = own.batch;
  const bool back = own.back;
  const int unit0 = place().rank * UNITS;
  load_turned(m, u, own.weights);
  Turns turns(m, (unsigned)(PARTS * own.rows * UNITS * 4));

  // Rows and terms that do not exist stay zero.
  for (int i = threadIdx.x; i < 2 * TERMS; i += THREADS) m.terms[i] = {{0, 0, 0, 0}};
  float carry[EACH], grad_cell[EACH];  // of the state past the product, and of the cell
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    const int output = e * THREADS + threadIdx.x, unit = unit0 + output % UNITS;
    const i64 at = (i64)(output / UNITS) * HIDDEN + unit;
    const bool there = output < OUTPUTS && unit < HIDDEN && output / UNITS < own.rows;
    carry[e] = there && own.grad_last != nullptr ? widen(own.grad_last[at]) : 0.f;
    grad_cell[e] = there && CELL == LSTM && own.grad_last_cell != nullptr ? widen(own.grad_last_cell[at]) : 0.f;
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
      const Real* from = own.grad + at * own.grad_row + unit;
      to[e].given = !there ? Real(0) : EXCHANGED ? load_exchanged(from) : *from;
#pragma unroll
      for (int g = 0; g < KEPT_GATES; ++g) {
        if constexpr (CELL == LSTM || CELL == GRU) to[e].gate[g] = there ? own.gates[(at * GATES + g) * HIDDEN + unit] : Real(0);
        else to[e].gate[g] = there ? own.states[at * own.row + unit] : Real(0);
      }
      if constexpr (CELL == LSTM) {
        to[e].cell[0] = there ? own.cells[at * HIDDEN + unit] : 0.f;
        to[e].cell[1] = !there ? 0.f : at_first ? widen(own.first_cell[n * HIDDEN + unit]) : own.cells[(before * batch + n) * HIDDEN + unit];
      } else if constexpr (CELL == GRU) {
        to[e].extra[0] = there ? own.part[at * HIDDEN + unit] : Real(0);
        to[e].extra[1] = !there ? Real(0) : at_first ? own.first[n * HIDDEN + unit] : own.states[(before * batch + n) * own.row + unit];
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
      if (s > 0 && there) dh += total_of(m, turn, n, output % UNITS);
      if (s == steps) {
        if (there) {
          own.grad_first[n * HIDDEN + unit] = narrow(dh);
          if constexpr (CELL == LSTM) own.grad_first_cell[n * HIDDEN + unit] = narrow(grad_cell[e]);
        }
        continue;
      }
      const i64 at = now * batch + n;
      if constexpr (EXCHANGED) {
        while (there && is_missing(known[e].given)) {
          known[e].given = load_exchanged(own.grad + at * own.grad_row + unit);
          if (is_missing(known[e].given)) look_again();
        }
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
#pragma unroll
      for (int g = 0; g < GATES; ++g) {
        const Words all = together(change[g]);
        const bool first_of = there && leads();
        if (first_of) store_shared_words(own.changes + (at * GATES + g) * HIDDEN + unit, all);
        if (CELL == GRU && g == 2) {
          const Words by_weights = together(own_change);
          if (first_of) store_shared_words(own.own_changes + at * HIDDEN + unit, by_weights);
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
    multiply_and_send(m, turn, u, own.rows);
  }
  meet_cluster();  // no block ends while another may still send to it
}
