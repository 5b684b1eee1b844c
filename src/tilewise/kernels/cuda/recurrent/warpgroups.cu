// Products of recurrent layers by warpgroups (compute capability 9.0, numbers of 16 bits): the columns of the weights are
// rows of their units, tiles of 64, and the batch rows are columns. Units read a tile's terms from shared memory once, and
// weights that registers do not hold by themselves.
//
// Terms lie in shared memory as sixteen bytes of a row, rows one after another, then the next eight terms, APART words
// further on: two words more than rows, so that threads that store neighbouring terms meet no bank twice. Sums are in
// groups of eight rows; in these each column's eight lie together, its two fours exchanged in every other four columns.

constexpr bool TOGETHER = false;
constexpr int STEPS = 2 * CK;                                  // of a block's share, of 16 terms
constexpr int WIDTH = NT * 8;                                  // columns of a block
constexpr int MT = (CLUSTER * WIDTH + 63) / 64;                // tiles of 64 columns of all the cluster
constexpr int CT = (MT + WC - 1) / WC;                         // of a warpgroup
constexpr int KS = STEPS / WK;                                 // steps of a warpgroup
constexpr int HELD = KS * CT < KEPT ? KS * CT : KEPT;          // pieces of 64 x 16 weights in registers
constexpr int APART = ROWS + 2;
constexpr int READS = (WORDS + THREADS - 1) / THREADS;         // words of a thread
constexpr int ROUNDS = (READS + MOST_READ - 1) / MOST_READ;
constexpr int LOADS = (READS + ROUNDS - 1) / ROUNDS;           // at a time

using Loads = Fetched<LOADS>;
__device__ __forceinline__ int row_of(int i) { return (i * THREADS + (int)threadIdx.x) / 4 % ROWS; }
__device__ __forceinline__ int chunk_of(int i) { return (i * THREADS + (int)threadIdx.x) / (4 * ROWS); }
__device__ __forceinline__ int term_of(int i) {
  return (place().rank * CK + chunk_of(i)) * CHUNK + (int)threadIdx.x % 4 * WIDE;
}
constexpr bool WHOLE = CLUSTER * CK * CHUNK == DEPTH && WORDS == ROUNDS * LOADS * THREADS;  // all words of all threads
__device__ __forceinline__ bool exists(int i) { return WHOLE || (chunk_of(i) < CK && term_of(i) < DEPTH); }

// Weights of step ``i`` and tile ``j`` of a warpgroup. WEIGHT(owner, column, term, count) reads count x 4 bytes of them.
struct Slice {
  unsigned held[HELD][4];
  unsigned left;

  static __device__ __forceinline__ unsigned bytes_before(int piece) {
    return ((piece - HELD) * (THREADS / TEAM) + (int)threadIdx.x / TEAM) * 2048;
  }

  template <class Weight> __device__ __forceinline__ void load(const Memory& m, const Weight& weight) {
    const Place at = place();
    left = shared_address(m.weights);
    const auto words_of = [&](int i, int j, int row, int depth, int count) {  // of a row of a tile, ``depth`` terms on
      const int all = (at.group * CT + j) * 64 + row, step = at.part * KS + i;
      const int k = (at.rank * STEPS + step) * 16 + depth;
      Words words = {{0, 0, 0, 0}};
      if (all < CLUSTER * WIDTH && all % WIDTH < COLUMNS && step < STEPS && i < KS && k < DEPTH)
        words = weight(all / WIDTH, all % WIDTH, k, count);
      return words;
    };
#pragma unroll
    for (int piece = 0; piece < KS * CT; ++piece) {
      const int i = piece / CT, j = piece % CT;
      if (piece < HELD) {
        const int row = at.lane / 32 * 16 + at.lane % 32 / 4, depth = at.lane % 4 * 2;
#pragma unroll
        for (int w = 0; w < 4; ++w) held[piece][w] = words_of(i, j, row + w % 2 * 8, depth + w / 2 * 8, 1).w[0];
      } else {
        Words* to = m.weights + bytes_before(piece) / 16;
        to[at.lane] = words_of(i, j, at.lane % 64, at.lane / 64 * 8, 4);
      }
    }
    fence_for_units();
  }
};

__device__ __forceinline__ void put(Words* terms, const Loads& from, int first) {
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    const int word = (first + i) * THREADS + (int)threadIdx.x;
    if (word < WORDS) terms[(chunk_of(first + i) * 4 + (int)threadIdx.x % 4) * APART + row_of(first + i)] = from.words[i];
  }
}

__device__ __forceinline__ int sum_at(int row, int column) {
  return (row / 8 * WIDTH + column) * 8 + (row / 4 % 2 ^ column / 4 % 2) * 4 + row % 4;
}

// The product of a tile's terms, sent to the blocks whose units they are.
__device__ __forceinline__ void multiply_tile(const Memory& m, int turn, const Slice& u) {
  const Place at = place();
  const unsigned terms = shared_address(m.terms) + at.part * KS * 2 * APART * 16;
  float sums[CT][ROWS / 2];
#pragma unroll
  for (int j = 0; j < CT; ++j) begin_sums(sums[j]);
  units_begin();
#pragma unroll
  for (int piece = 0; piece < KS * CT; ++piece) {
    const int i = piece / CT, j = piece % CT;
    const unsigned long long b = operand(terms + i * 2 * APART * 16, APART * 16, 128);
    if (piece < HELD) multiply_held(sums[j], u.held[piece], b, i > 0);
    else multiply_shared(sums[j], operand(u.left + Slice::bytes_before(piece), 1024, 128), b, i > 0);
  }
  units_commit();
  units_wait();
#pragma unroll
  for (int j = 0; j < CT; ++j) {
    keep_sums(sums[j]);
    const int lane = at.lane % 32, odd = lane % 2;
    const int eight = (at.group * CT + j) * 8 + at.lane / 32 * 2 + odd, owner = eight / NT;  // of columns
    const int column = eight % NT * 8 + lane / 4, from = CLUSTER == 1 ? 0 : at.rank;
    float* to = m.sums + turn * SUMS + (from * WK + at.part) * ROWS * WIDTH + sum_at(lane % 4 / 2 * 4, column);
#pragma unroll
    for (int n = 0; n < ROWS / 8; ++n) {
      const float four[4] = {sums[j][4 * n], sums[j][4 * n + 1], sums[j][4 * n + 2], sums[j][4 * n + 3]};
      const float4 all = four_of(four);
      if (owner < CLUSTER) give(to + n * WIDTH * 8, all, owner, m.sent + turn);
    }
  }
}

// The parts of a block's sums, which the blocks of its cluster send to it.
struct Sums : Arrivals {
  const float* own;

  __device__ __forceinline__ explicit Sums(const Memory& m) : Arrivals(m.sent), own(m.sums) {}
  __device__ __forceinline__ float total(int turn, int row, int column) const {
    const float* at = own + turn * SUMS + sum_at(row, column);
    float parts[CLUSTER * WK], sum = 0.f;
#pragma unroll
    for (int part = 0; part < CLUSTER * WK; ++part) parts[part] = at[part * ROWS * WIDTH];
#pragma unroll
    for (int part = 0; part < CLUSTER * WK; ++part) sum += parts[part];
    return sum;
  }
  template <int COUNT> __device__ __forceinline__ void total(int turn, int row, int column, float (&sum)[COUNT]) const {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) sum[i] = total(turn, row, column + i);
  }
};

// The sums of a tile are there after this. The first of ``loads`` were fetched; ``next`` fetches those of the next tile.
template <class Source, class Next>
__device__ __forceinline__ void product(const Memory& m, int turn, Loads& loads, const Source& source, bool exchanged,
                                        const Slice& u, Sums& sums, const Next& next) {
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round) {
    settle(loads, source, exchanged, round * LOADS);
    if (round == 0) __syncthreads();  // all warps are done with the terms before
    put(m.terms, loads, round * LOADS);
    if (round + 1 < ROUNDS) fetch(loads, source, (round + 1) * LOADS);
  }
  fence_for_units();
  __syncthreads();
  next();
  multiply_tile(m, turn, u);
  sums.wait(m.sent, turn);
}
