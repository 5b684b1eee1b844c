// All steps of one layer in all its directions. Grid: a cluster for each ROWS batch rows of each direction, whose blocks
// send the states of their units to each other.
//
// ``gates`` (directions, steps, batch, GATES x HIDDEN) holds the input's part of each gate, and gets the gates' values where
// they are kept for the backward pass. ``states`` (steps, batch, directions x HIDDEN) has rows ``row`` numbers apart. Where
// there are two directions, the second one runs backwards in time; where there is one, it does so if ``backwards``.

// A unit's gates lie side by side in the sums where they are four, which are then read at once.
constexpr bool TOGETHER = GATES == 4;
__device__ __forceinline__ int unit_of(int sum) { return TOGETHER ? sum / GATES : sum % UNITS; }
__device__ __forceinline__ int gate_of(int sum) { return TOGETHER ? sum % GATES : sum / UNITS; }

constexpr int ROW = 16 * MT + 4;       // floats of a batch row of sums: no bank twice
constexpr int PART = ROWS * ROW;       // of a group of terms

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

extern "C" __global__ void BOUNDS cluster_forward(
    Real* gates, const Real* weights, const Real* weights_back, const Real* bias, const Real* bias_back, const Real* first,
    const Real* first_cell, Real* states, float* cells, Real* part, Real* last, Real* last_cell, i64 steps, i64 batch,
    i64 row, i64 backwards, i64 keep) {
  const Part own = part_of(batch);
  const bool back = own.direction ? true : backwards != 0;
  const int unit0 = place().rank * UNITS;
  const Memory m = memory();
  Slice u;
  {
    const Real* from = own.direction ? weights_back : weights;
    u.load(m, [&](int sum, int term) {
      const int unit = unit0 + unit_of(sum);
      Words words = {{0, 0, 0, 0}};
      if (unit < HIDDEN) words = *(const Words*)(from + ((i64)gate_of(sum) * HIDDEN + unit) * HIDDEN + term);
      return words;
    });
  }
  Turns turns(m, (unsigned)own.rows * HIDDEN * sizeof(Real));
  // This direction's and these rows' part of each tensor.
  const i64 rows = steps * batch;
  gates += (own.direction * rows + own.row0) * GATES * HIDDEN;
  cells += (own.direction * rows + own.row0) * HIDDEN;
  part += (own.direction * rows + own.row0) * HIDDEN;
  states += own.row0 * row + own.direction * HIDDEN;
  first += (own.direction * batch + own.row0) * HIDDEN;
  first_cell += (own.direction * batch + own.row0) * HIDDEN;
  last += (own.direction * batch + own.row0) * HIDDEN;
  last_cell += (own.direction * batch + own.row0) * HIDDEN;
  bias = own.direction ? bias_back : bias;

  // The first states of all units. Rows and terms that do not exist stay zero.
  for (int i = threadIdx.x; i < 2 * TERMS; i += THREADS) {
    const int n = i / 4 % ROWS, term = i / 4 / ROWS * CHUNK + i % 4 * WIDE;
    Words words = {{0, 0, 0, 0}};
    if (i < TERMS && n < own.rows && term < HIDDEN) words = *(const Words*)(first + (i64)n * HIDDEN + term);
    m.terms[i] = words;
  }
  float state[EACH], cell[EACH], shift[EACH];
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    const int output = e * THREADS + threadIdx.x, unit = unit0 + output % UNITS;
    const i64 at = (i64)(output / UNITS) * HIDDEN + unit;
    const bool there = output < OUTPUTS && unit < HIDDEN && output / UNITS < own.rows;
    shift[e] = CELL == GRU && bias != nullptr && there ? widen(bias[unit]) : 0.f;
    state[e] = CELL == GRU && there ? widen(first[at]) : 0.f;
    cell[e] = CELL == LSTM && there ? widen(first_cell[at]) : 0.f;
    if (there && steps == 0) {
      last[at] = first[at];
      if constexpr (CELL == LSTM) last_cell[at] = first_cell[at];
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
      for (int g = 0; g < GATES; ++g) to[e][g] = there ? gates[((now * batch + n) * GATES + g) * HIDDEN + unit] : Real(0);
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
      const Place at = place();
      float* to = m.sums + at.part * PART + (r * 8 + at.lane % 4 * 2) * ROW + tile * 16 + at.lane / 4;
      to[0] = sums[0], to[ROW] = sums[1], to[8] = sums[2], to[ROW + 8] = sums[3];
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
      for (int g = 0; g < GATES; ++g) x[g] = widen(given[e][g]);
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
      if (leads()) *(Words*)(states + at * row + unit) = all;
      if (keep) {
        Real* kept = gates + at * GATES * HIDDEN + unit;
        if constexpr (CELL == LSTM) {
          kept[0] = narrow(in), kept[HIDDEN] = narrow(forget), kept[2 * HIDDEN] = narrow(fresh);
          kept[3 * HIDDEN] = narrow(out);
          cells[at * HIDDEN + unit] = cell[e];
        } else if constexpr (CELL == GRU) {
          kept[0] = narrow(in), kept[HIDDEN] = narrow(forget), kept[2 * HIDDEN] = narrow(fresh);
          part[at * HIDDEN + unit] = narrow(own_part);
        }
      }
      if (s == steps - 1) {
        last[n * HIDDEN + unit] = narrow(h);
        if constexpr (CELL == LSTM) last_cell[n * HIDDEN + unit] = narrow(cell[e]);
      }
    }
    ask(s + 1, given);
  }
  meet_cluster();  // no block ends while another may still send to it
}
