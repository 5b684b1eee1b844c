// Products of recurrent layers by warps: each multiplies tiles of 16 x 8 numbers by itself, of any type.
//
// Sums of a tile of 8 columns are STRIDE floats, their rows one after another: so many that no bank is read twice.

constexpr bool TOGETHER = GATES == 4 && COLUMNS == 4 * UNITS;  // a unit's gates lie side by side, and are read at once
constexpr int CT = (CLUSTER * NT + WC - 1) / WC;                         // of a warp, among all of the cluster
constexpr int CW = (CK + WK - 1) / WK;                                   // of a warp
// Where no two warps need the same terms, each thread reads just those that it multiplies, and they skip shared memory.
constexpr bool DIRECT = WC == 1;
constexpr int LOADS = DIRECT ? 2 * CW * HIGH : (WORDS + THREADS - 1) / THREADS;  // of a thread
constexpr int CHAINS = CT * HIGH < 3 ? 2 : 1;  // sums of a column tile that do not wait for each other
constexpr int HELD = CW * CT < KEPT ? CW * CT : KEPT;                    // words of weights in a thread's registers

// Weights of chunk ``i`` and column tile ``j`` of a warp. WEIGHT(owner, column, term, 4) reads sixteen bytes of them.
struct Slice {
  Words held[HELD];
  const Words* left;

  template <class Weight> __device__ __forceinline__ void load(const Memory& m, const Weight& weight) {
    const Place at = place();
    left = m.weights;
#pragma unroll
    for (int i = 0; i < CW; ++i)
#pragma unroll
      for (int j = 0; j < CT; ++j) {
        const int tile = at.group * CT + j, column = tile % NT * 8 + at.lane / 4, owner = tile / NT;
        const int chunk = at.part * CW + i, k = (at.rank * CK + chunk) * CHUNK + at.lane % 4 * WIDE;
        Words words = {{0, 0, 0, 0}};
        if (owner < CLUSTER && column < COLUMNS && chunk < CK && k < DEPTH) words = weight(owner, column, k, 4);
        if (i * CT + j < HELD) held[i * CT + j] = words;
        else m.weights[(i * CT + j - HELD) * THREADS + threadIdx.x] = words;
      }
  }
  __device__ __forceinline__ Words at(int i, int j) const {
    if (i * CT + j < HELD) return held[i * CT + j];
    return left[(i * CT + j - HELD) * THREADS + threadIdx.x];
  }
};

// A thread's words are in the order in which warps read them: chunk, row, four words.
using Loads = Fetched<LOADS>;
__device__ __forceinline__ int row_of(int i) {
  return DIRECT ? i % (2 * HIGH) * 8 + (int)threadIdx.x % 32 / 4 : (i * THREADS + (int)threadIdx.x) / 4 % ROWS;
}
__device__ __forceinline__ int chunk_of(int i) {
  return DIRECT ? (int)threadIdx.x / 32 * CW + i / (2 * HIGH) : (i * THREADS + (int)threadIdx.x) / (4 * ROWS);
}
__device__ __forceinline__ int term_of(int i) {
  return (place().rank * CK + chunk_of(i)) * CHUNK + (int)threadIdx.x % 4 * WIDE;
}
// Whether all words of all threads exist.
constexpr bool WHOLE = CLUSTER * CK * CHUNK == DEPTH && (DIRECT ? CW * WK == CK : WORDS % THREADS == 0);
__device__ __forceinline__ bool exists(int i) { return WHOLE || (chunk_of(i) < CK && term_of(i) < DEPTH); }

__device__ __forceinline__ void put(Words* terms, const Loads& from) {
#pragma unroll
  for (int i = 0; i < LOADS; ++i)
    if (i * THREADS + (int)threadIdx.x < WORDS) terms[i * THREADS + threadIdx.x] = from.words[i];
}

// A warp's sums of 16 x 8 numbers, to ``to`` in block ``owner``: a thread has two neighbours of a row and two of the row
// that is eight below.
__device__ __forceinline__ void put_sums(const Memory& m, int turn, int owner, float* to, const float (&sums)[4]) {
  const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
  if constexpr (CLUSTER == 1) {
    *(float2*)(to + row * 8 + column) = make_float2(sums[0], sums[1]);
    *(float2*)(to + (row + 8) * 8 + column) = make_float2(sums[2], sums[3]);
  } else {
    give(to + (lane % 2 ? row + 8 : row) * 8 + column / 4 * 4, four_of(sums), owner, m.sent + turn);
  }
}

// The product of a tile's terms, sent to the blocks whose units they are.
__device__ __forceinline__ void multiply_tile(const Memory& m, int turn, const Loads& loads, const Slice& u) {
  const Place at = place();
  const Words* terms = m.terms + at.part * CW * 4 * ROWS + at.lane;
  float sums[HIGH][CT][CHAINS][4] = {};
#pragma unroll
  for (int i = 0; i < CW; ++i) {
    if (!DIRECT && CW * WK != CK && at.part * CW + i >= CK) break;
    Words above[HIGH], below[HIGH];
#pragma unroll
    for (int h = 0; h < HIGH; ++h) {
      const int from = 2 * (i * HIGH + h);
      above[h] = DIRECT ? loads.words[from] : terms[from * 32];
      below[h] = DIRECT ? loads.words[from + 1] : terms[from * 32 + 32];
    }
#pragma unroll
    for (int j = 0; j < CT; ++j) {
      const Words b = u.at(i, j);
#pragma unroll
      for (int s = 0; s < 2; ++s)
#pragma unroll
        for (int h = 0; h < HIGH; ++h) {
          const unsigned a[4] = {above[h].w[2 * s], below[h].w[2 * s], above[h].w[2 * s + 1], below[h].w[2 * s + 1]};
          multiply(sums[h][j][s % CHAINS], a, b.w[2 * s], b.w[2 * s + 1]);
        }
    }
  }
#pragma unroll
  for (int j = 0; j < CT; ++j) {
    const int tile = at.group * CT + j, owner = tile / NT;
    if (owner >= CLUSTER) break;
    const int from = CLUSTER == 1 ? 0 : at.rank;
#pragma unroll
    for (int h = 0; h < HIGH; ++h) {
      float* to = m.sums + turn * SUMS + ((from * WK + at.part) * NT + tile % NT) * STRIDE + h * 16 * 8;
      if constexpr (CHAINS == 2)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[h][j][0][i] += sums[h][j][1][i];
      put_sums(m, turn, owner, to, sums[h][j][0]);
    }
  }
}

// The parts of a block's sums, which the blocks of its cluster send to it.
struct Sums : Arrivals {
  const float* own;

  __device__ __forceinline__ explicit Sums(const Memory& m) : Arrivals(m.sent), own(m.sums) {}
  __device__ __forceinline__ static int place_of(int turn, int row, int column) {
    return turn * SUMS + column / 8 * STRIDE + row * 8 + column % 8;
  }
  __device__ __forceinline__ float total(int turn, int row, int column) const {
    const int at = place_of(turn, row, column);
    float parts[CLUSTER * WK], sum = 0.f;
#pragma unroll
    for (int part = 0; part < CLUSTER * WK; ++part) parts[part] = own[part * NT * STRIDE + at];
#pragma unroll
    for (int i = 0; i < CLUSTER * WK; ++i) sum += parts[i];
    return sum;
  }
  // Of four columns in a row.
  template <int COUNT> __device__ __forceinline__ void total(int turn, int row, int column, float (&sum)[COUNT]) const {
    const int at = place_of(turn, row, column);
    float4 parts[CLUSTER * WK];
#pragma unroll
    for (int part = 0; part < CLUSTER * WK; ++part)
      parts[part] = *(const float4*)(own + part * NT * STRIDE + at);
    float four[4] = {};
#pragma unroll
    for (int part = 0; part < CLUSTER * WK; ++part) {
      four[0] += parts[part].x, four[1] += parts[part].y, four[2] += parts[part].z, four[3] += parts[part].w;
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) sum[i] = four[i];
  }
};

// The sums of a tile are there after this. ``loads`` were fetched; ``next`` fetches those of the next tile. Of two tiles in
// a row each has memory of its own, and blocks are done with the one before when they come here.
template <class Source, class Next>
__device__ __forceinline__ void product(const Memory& m, int turn, Loads& loads, const Source& source, bool exchanged,
                                        const Slice& u, Sums& sums, const Next& next) {
  settle(loads, source, exchanged);
  if constexpr (!DIRECT) {
    __syncthreads();  // all warps are done with the terms before
    put(m.terms, loads);
    __syncthreads();
    next();
  }
  multiply_tile(m, turn, loads, u);
  if constexpr (DIRECT) next();
  sums.wait(m.sent, turn);
}
