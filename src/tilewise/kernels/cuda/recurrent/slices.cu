// What both directions of a recurrent layer share: a block's slice of the weights, the product with what all blocks have
// written, and the exchange of results.
//
// CLUSTER blocks own UNITS hidden units each, for TILES tiles of 16 batch rows. A product's sum over DEPTH terms is divided
// among the blocks of the cluster: each reads its share of the terms alone, multiplies it by the weights of all units of
// the cluster, and leaves the sums of each block's units in shared memory, where that block reads them. So a multiprocessor reads a share of a step's
// numbers, and the weights that it holds are as many as without a cluster. They stay in registers and shared memory for
// all steps. Within a block WC groups of warps have different columns, WK groups different terms.
//
// The numbers of a step are exchanged among clusters through the tensors that hold them anyway. These are full of ones
// (EMPTY) at first, and four bytes of them are written at once, so a reader sees from a word by itself whether it is there:
// there is no flag, and no barrier among all blocks.

constexpr int THREADS = 32 * WC * WK;
constexpr int NT = (COLUMNS + 7) / 8;                                    // tiles of 8 columns of a block
constexpr int CT = (CLUSTER * NT + WC - 1) / WC;                         // of a warp, among all of the cluster
constexpr int CK = (DEPTH + CHUNK * CLUSTER - 1) / (CHUNK * CLUSTER);    // chunks of a block's share of the terms
constexpr int CW = (CK + WK - 1) / WK;                                   // of a warp
constexpr int WORDS = 64 * CK;                                           // of sixteen bytes, of a tile's share
// Where no two warps need the same terms, each thread reads just those that it multiplies, and they skip shared memory.
constexpr bool DIRECT = WC == 1;
constexpr int LOADS = DIRECT ? 2 * CW : (WORDS + THREADS - 1) / THREADS;  // of a thread
constexpr int ROW = 8 * NT % 32 == 8 || 8 * NT % 32 == 24 ? 8 * NT : 8 * NT + 8;  // floats of a row of sums: no bank twice
constexpr int SUMS = CLUSTER * WK * 16 * ROW;                            // of a tile, for all blocks of the cluster
constexpr int CHAINS = CT < 3 ? 2 : 1;  // sums of a column tile that do not wait for each other
constexpr int OUTPUTS = 16 * UNITS;                                      // of a tile
constexpr int EACH = (OUTPUTS + THREADS - 1) / THREADS;
constexpr int HELD = CW * CT < KEPT ? CW * CT : KEPT;                    // words of weights in a thread's registers

// Shared memory: two tiles' sums, two tiles' terms, the weights that registers do not hold.
struct Memory {
  float* sums;
  Words *terms, *weights;
};
__device__ __forceinline__ Memory memory() {
  Memory m;
  m.sums = (float*)shared_memory();
  m.terms = (Words*)(m.sums + 2 * SUMS);
  m.weights = m.terms + (DIRECT ? 0 : 2 * WORDS);
  return m;
}

struct Place { int rank, group, part, lane; };  // of the block in its cluster, of the warp among columns and among terms
__device__ __forceinline__ Place place() {
  const int warp = threadIdx.x / 32;
  return {(int)(blockIdx.x % CLUSTER), warp % WC, warp / WC, (int)(threadIdx.x % 32)};
}

// Weights of chunk ``i`` and column tile ``j`` of a warp. WEIGHT(owner, column, term) reads sixteen bytes of them.
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
        if (owner < CLUSTER && column < COLUMNS && chunk < CK && k < DEPTH) words = weight(owner, column, k);
        if (i * CT + j < HELD) held[i * CT + j] = words;
        else m.weights[(i * CT + j - HELD) * THREADS + threadIdx.x] = words;
      }
  }
  __device__ __forceinline__ Words at(int i, int j) const {
    if (i * CT + j < HELD) return held[i * CT + j];
    return left[(i * CT + j - HELD) * THREADS + threadIdx.x];
  }
};

// A thread's words of a tile's terms, in the order in which warps read them: chunk, row, four words.
struct Loads { Words words[LOADS]; };
__device__ __forceinline__ int row_of(int i) {
  return DIRECT ? i % 2 * 8 + (int)threadIdx.x % 32 / 4 : (i * THREADS + (int)threadIdx.x) / 4 % 16;
}
__device__ __forceinline__ int chunk_of(int i) {
  return DIRECT ? (int)threadIdx.x / 32 * CW + i / 2 : (i * THREADS + (int)threadIdx.x) / 64;
}
__device__ __forceinline__ int term_of(int i) {
  return (place().rank * CK + chunk_of(i)) * CHUNK + (int)threadIdx.x % 4 * WIDE;
}
__device__ __forceinline__ bool exists(int i) { return chunk_of(i) < CK && term_of(i) < DEPTH; }

// SOURCE(row, term) is the address of sixteen bytes.
template <class Source> __device__ __forceinline__ void fetch(Loads& to, const Source& source) {
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    to.words[i] = {{0, 0, 0, 0}};
    if (exists(i)) to.words[i] = load_shared_words(source(row_of(i), term_of(i)));
  }
}

__device__ __forceinline__ bool missing_in(const Words& a) {
  return a.w[0] == EMPTY || a.w[1] == EMPTY || a.w[2] == EMPTY || a.w[3] == EMPTY;
}

// Loads again what was not there. ``exchanged``: other blocks write it meanwhile.
template <class Source> __device__ __forceinline__ void settle(Loads& to, const Source& source, bool exchanged) {
  if (!exchanged) return;
#pragma unroll 1
  for (bool missing = true; missing;) {
    missing = false;
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
      if (missing_in(to.words[i])) {
        to.words[i] = load_shared_words(source(row_of(i), term_of(i)));
        missing = true;
      }
    if (missing) look_again();
  }
}

__device__ __forceinline__ void put(Words* terms, const Loads& from) {
#pragma unroll
  for (int i = 0; i < LOADS; ++i)
    if (i * THREADS + (int)threadIdx.x < WORDS) terms[i * THREADS + threadIdx.x] = from.words[i];
}

// The product of a tile's terms, sent to the blocks whose units they are.
__device__ __forceinline__ void multiply_tile(const Memory& m, int turn, const Loads& loads, const Slice& u) {
  const Place at = place();
  const Words* terms = m.terms + turn * WORDS + at.part * CW * 64 + at.lane;
  float sums[CT][CHAINS][4] = {};
#pragma unroll
  for (int i = 0; i < CW; ++i) {
    if (!DIRECT && CW * WK != CK && at.part * CW + i >= CK) break;
    const Words above = DIRECT ? loads.words[2 * i] : terms[i * 64], below = DIRECT ? loads.words[2 * i + 1] : terms[i * 64 + 32];
#pragma unroll
    for (int j = 0; j < CT; ++j) {
      const Words b = u.at(i, j);
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const unsigned a[4] = {above.w[2 * s], below.w[2 * s], above.w[2 * s + 1], below.w[2 * s + 1]};
        multiply(sums[j][s % CHAINS], a, b.w[2 * s], b.w[2 * s + 1]);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < CT; ++j) {
    const int tile = at.group * CT + j, owner = tile / NT;
    if (owner >= CLUSTER) break;
    float* to = m.sums + turn * SUMS + ((owner * WK + at.part) * 16 + at.lane / 4) * ROW + tile % NT * 8 + at.lane % 4 * 2;
    if constexpr (CHAINS == 2)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[j][0][i] += sums[j][1][i];
    *(float2*)to = make_float2(sums[j][0][0], sums[j][0][1]);
    *(float2*)(to + 8 * ROW) = make_float2(sums[j][0][2], sums[j][0][3]);
  }
}

// Where the parts of a block's sums lie: in its own shared memory, and in that of the others of its cluster.
struct Sums {
  const float* own;
  unsigned others[CLUSTER];

  __device__ __forceinline__ explicit Sums(const Memory& m) : own(m.sums) {
    if constexpr (CLUSTER > 1)
#pragma unroll
      for (int r = 0; r < CLUSTER; ++r) others[r] = peer_address<CLUSTER>(m.sums, r) + place().rank * WK * 16 * ROW * 4;
  }
  __device__ __forceinline__ float total(int turn, int row, int column) const {
    float parts[CLUSTER * WK], sum = 0.f;
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r)
#pragma unroll
      for (int part = 0; part < WK; ++part) {
        const int at = turn * SUMS + (part * 16 + row) * ROW + column;
        if constexpr (CLUSTER == 1) parts[part] = own[at];
        else parts[r * WK + part] = load_cluster(others[r] + 4 * at);
      }
#pragma unroll
    for (int i = 0; i < CLUSTER * WK; ++i) sum += parts[i];
    return sum;
  }
};

// All blocks of the cluster have written before this what any of them reads after it.
__device__ __forceinline__ void meet_cluster() {
  if constexpr (CLUSTER == 1) __syncthreads();
  else {
    arrive_cluster();
    wait_cluster();
  }
}

// The sums of a tile are there after this. ``loads`` were fetched; ``next`` fetches those of the next tile. Of two tiles in
// a row each has memory of its own, and blocks are done with the one before when they come here.
template <class Source, class Next>
__device__ __forceinline__ void product(const Memory& m, int turn, Loads& loads, const Source& source, bool exchanged,
                                        const Slice& u, const Next& next) {
  settle(loads, source, exchanged);
  if constexpr (!DIRECT) {
    put(m.terms + turn * WORDS, loads);
    __syncthreads();
    next();
  }
  multiply_tile(m, turn, loads, u);
  if constexpr (DIRECT) next();
  meet_cluster();
}

// Numbers of WIDE neighbouring threads, written by the first of them at once.
__device__ __forceinline__ void store_together(Real* p, float value, bool wanted) {
  const unsigned bits = bits_to_store(value);
  const int lane = threadIdx.x % 32;
  Words all;
  if constexpr (REAL == 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) all.w[i] = __shfl_sync(~0u, bits, (lane + i) % 32);
  } else {
    const unsigned next = __shfl_sync(~0u, bits, (lane + 1) % 32);
    const unsigned both = bits | next << 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) all.w[i] = __shfl_sync(~0u, both, (lane + 2 * i) % 32);
  }
  if (wanted && lane % WIDE == 0) store_shared_words(p, all);
}
