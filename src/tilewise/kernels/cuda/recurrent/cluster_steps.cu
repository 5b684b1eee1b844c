// All steps of a direction of a layer, for the batch rows of a cluster whose blocks send the states of their units to each
// other. Kernels that run it for several directions or layers are in files of their own.

// A unit's gates lie side by side in the sums where they are four, which are then read at once.
constexpr bool TOGETHER = GATES == 4;
__device__ __forceinline__ int unit_of(int sum) { return TOGETHER ? sum / GATES : sum % UNITS; }
__device__ __forceinline__ int gate_of(int sum) { return TOGETHER ? sum % GATES : sum / UNITS; }

constexpr int ROW = 16 * MT + 4;       // floats of a batch row of sums: no bank twice
constexpr int PART = ROWS * ROW;       // of a group of terms

// What ``multiply_terms`` found for a tile, as ``sums_of`` reads it.
__device__ __forceinline__ void put_sums(float* sums, int tile, int r, const float (&found)[4]) {
  const Place at = place();
  float* to = sums + at.part * PART + (r * 8 + at.lane % 4 * 2) * ROW + tile * 16 + at.lane / 4;
  to[0] = found[0], to[ROW] = found[1], to[8] = found[2], to[ROW + 8] = found[3];
}
__device__ __forceinline__ void sums_of(const float* sums, int row, int unit, float (&sum)[GATES]) {
#pragma unroll
  for (int g = 0; g < GATES; ++g) sum[g] = 0.f;
#pragma unroll
  for (int part = 0; part < WK; ++part) {
    const float* from = sums + part * PART + row * ROW;
    if constexpr (TOGETHER) {
      const float4 four = *(const float4*)(from + unit * GATES);
      const float values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int g = 0; g < GATES; ++g) sum[g] += values[g];
    } else {
#pragma unroll
      for (int g = 0; g < GATES; ++g) sum[g] += from[g * UNITS + unit];
    }
  }
}

// What a cluster reads and writes, from its own first batch row on. ``gates`` holds the input's part of each gate of a
// batch row, GATES x HIDDEN, and gets the gates' values where they are kept for the backward pass. Rows of ``states`` are
// ``row`` numbers apart.
struct Steps {
  Real* gates;
  const Real *weights, *bias, *first, *first_cell;
  Real* states;
  float* cells;
  Real *part, *last, *last_cell;
  i64 steps, batch, row, rows;
  bool back, keep;
};

// EXCHANGED: another cluster writes ``gates`` meanwhile, which are EMPTY at first.
template <bool EXCHANGED> __device__ __forceinline__ void run_steps(const Memory& m, Slice& u, const Steps& own) {
  const i64 steps = own.steps, batch = own.batch;
  const bool back = own.back;
  const int unit0 = place().rank * UNITS;
  u.load(m, [&](int sum, int term) {
    const int unit = unit0 + unit_of(sum);
    Words words = {{0, 0, 0, 0}};
    if (unit < HIDDEN) words = *(const Words*)(own.weights + ((i64)gate_of(sum) * HIDDEN + unit) * HIDDEN + term);
    return words;
  });
  Turns turns(m, (unsigned)own.rows * HIDDEN * sizeof(Real));

  // The first states of all units. Rows and terms that do not exist stay zero.
  for (int i = threadIdx.x; i < 2 * TERMS; i += THREADS) {
    const int n = i / 4 % ROWS, term = i / 4 / ROWS * CHUNK + i % 4 * WIDE;
    Words words = {{0, 0, 0, 0}};
    if (i < TERMS && n < own.rows && term < HIDDEN) words = *(const Words*)(own.first + (i64)n * HIDDEN + term);
    m.terms[i] = words;
  }
  float state[EACH], cell[EACH], shift[EACH];
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    const int output = e * THREADS + threadIdx.x, unit = unit0 + output % UNITS;
    const i64 at = (i64)(output / UNITS) * HIDDEN + unit;
    const bool there = output < OUTPUTS && unit < HIDDEN && output / UNITS < own.rows;
    shift[e] = CELL == GRU && own.bias != nullptr && there ? widen(own.bias[unit]) : 0.f;
    state[e] = CELL == GRU && there ? widen(own.first[at]) : 0.f;
    cell[e] = CELL == LSTM && there ? widen(own.first_cell[at]) : 0.f;
    if (there && steps == 0) {
      own.last[at] = own.first[at];
      if constexpr (CELL == LSTM) own.last_cell[at] = own.first_cell[at];
    }
  }

  // The input's part is asked for a step ahead, as it may come from memory, and widened where it is needed.
  const auto ask = [&](i64 s, Real (&to)[EACH][GATES]) {
    const i64 now = back ? steps - 1 - s : s;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int output = e * THREADS + threadIdx.x, unit = unit0 + output % UNITS, n = output / UNITS;
      const bool there = output < OUTPUTS && unit < HIDDEN && n < own.rows && s < steps;
#pragma unroll
      for (int g = 0; g < GATES; ++g) {
        const Real* from = own.gates + ((now * batch + n) * GATES + g) * HIDDEN + unit;
        to[e][g] = !there ? Real(0) : EXCHANGED ? load_exchanged(from) : *from;
      }
    }
  };
  Real given[EACH][GATES];
  ask(0, given);
  __syncthreads();
  meet_cluster();

  for (i64 s = 0; s < steps; ++s) {
    const i64 now = back ? steps - 1 - s : s;
    const int turn = (int)(s & 1);
    if (s > 0) turns.wait(m, turn);
    multiply_terms(m.terms + turn * TERMS, u, [&](int tile, int r, const float (&sums)[4]) {
      put_sums(m.sums, tile, r, sums);
    });
    // All warps have read the states of this turn when one sends those of the next but one. Sums are written again when all
    // states of the next step are there, which threads send after they have read theirs.
    __syncthreads();
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int output = e * THREADS + threadIdx.x, unit = unit0 + output % UNITS, n = output / UNITS;
      if (OUTPUTS % THREADS && output - (int)(threadIdx.x % 32) >= OUTPUTS) continue;  // whole warps
      const bool there = unit < HIDDEN && n < own.rows;
      float x[GATES], sum[GATES] = {}, h, in, forget, fresh, out, own_part;
      if (there) sums_of(m.sums, n, output % UNITS, sum);
#pragma unroll
      for (int g = 0; g < GATES; ++g) {
        if constexpr (EXCHANGED) {
          while (there && is_missing(given[e][g])) {
            given[e][g] = load_exchanged(own.gates + ((now * batch + n) * GATES + g) * HIDDEN + unit);
            if (is_missing(given[e][g])) look_again();
          }
        }
        x[g] = widen(given[e][g]);
      }
      if constexpr (CELL == LSTM) {
        in = sigmoid(x[0] + sum[0]), forget = sigmoid(x[1] + sum[1]);
        fresh = hyperbolic_tangent(x[2] + sum[2]), out = sigmoid(x[3] + sum[3]);
        cell[e] = forget * cell[e] + in * fresh;
        h = out * hyperbolic_tangent(cell[e]);
      } else if constexpr (CELL == GRU) {
        in = sigmoid(x[0] + sum[0]), forget = sigmoid(x[1] + sum[1]);  // reset and update
        own_part = sum[2] + shift[e], fresh = hyperbolic_tangent(x[2] + in * own_part);
        h = rounded((1.f - forget) * fresh + forget * state[e]);
        state[e] = h;
      } else {
        const float z = x[0] + sum[0];
        h = CELL == TANH ? hyperbolic_tangent(z) : z > 0.f || z != z ? z : 0.f;
      }
      const Words all = together(h);
      if (there && s + 1 < steps) {
        Words* to = m.terms + (turn ^ 1) * TERMS + place_of(n, unit / WIDE * WIDE);
        for (int rank = unit % WIDE; rank < CLUSTER; rank += WIDE)
          send_words(peer_address<CLUSTER>(to, rank), make_uint4(all.w[0], all.w[1], all.w[2], all.w[3]),
                     peer_address<CLUSTER>(m.arrived + (turn ^ 1), rank));
      }
      // Others wait for what is above. What is below has time until the step ends.
      if (!there) continue;
      const i64 at = now * batch + n;
      if (leads()) store_shared_words(own.states + at * own.row + unit, all);
      if (own.keep) {
        Real* kept = own.gates + at * GATES * HIDDEN + unit;
        if constexpr (CELL == LSTM) {
          kept[0] = narrow(in), kept[HIDDEN] = narrow(forget), kept[2 * HIDDEN] = narrow(fresh);
          kept[3 * HIDDEN] = narrow(out);
          own.cells[at * HIDDEN + unit] = cell[e];
        } else if constexpr (CELL == GRU) {
          kept[0] = narrow(in), kept[HIDDEN] = narrow(forget), kept[2 * HIDDEN] = narrow(fresh);
          own.part[at * HIDDEN + unit] = narrow(own_part);
        }
      }
      if (s == steps - 1) {
        own.last[n * HIDDEN + unit] = narrow(h);
        if constexpr (CELL == LSTM) own.last_cell[n * HIDDEN + unit] = narrow(cell[e]);
      }
    }
    ask(s + 1, given);
  }
  meet_cluster();  // no block ends while another may still send to it
}
