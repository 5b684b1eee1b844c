// What the kernels of one cluster for each direction and slice of the batch share: the weights of a block, and their
// product with what the block has in its shared memory.
//
// A cluster of CLUSTER blocks has all hidden units for SLICE batch rows, a block UNITS of them. Nothing is exchanged but
// through the shared memory of the cluster's blocks. Weights are the left operand of the matrix units: 16 of their rows
// meet 8 batch rows at a time, so a small batch wastes little. ROWS are the batch rows with those that do not exist; they
// are not sent. Within a block WC groups of warps have different rows of
// weights, WK groups different terms of the sums.

constexpr int THREADS = 32 * WC * WK;
constexpr int RT = ROWS / 8;                       // tiles of batch rows
constexpr int MT = (COLUMNS + 15) / 16;            // tiles of 16 sums of a batch row
constexpr int CT = (MT + WC - 1) / WC;             // of a warp
constexpr int CK = (DEPTH + CHUNK - 1) / CHUNK;    // chunks of terms
constexpr int CW = (CK + WK - 1) / WK;             // of a warp
constexpr int TERMS = CK * ROWS * 4;               // of sixteen bytes, that a product reads
constexpr int CHAINS = CT * RT >= 4 ? 1 : CT * RT >= 2 ? 2 : 4;  // sums that do not wait for each other, of a tile
constexpr int OUTPUTS = SLICE * UNITS;              // a multiple of a warp's threads
constexpr int EACH = (OUTPUTS + THREADS - 1) / THREADS;
constexpr int WORDS = 2 * CW * CT;                 // of weights, of a thread
constexpr int HELD = WORDS < KEPT ? WORDS : KEPT;  // those in registers

#ifndef EMULATED
// As ``send_cluster`` of two numbers: sixteen bytes into another block's shared memory, counted by its barrier.
__device__ __forceinline__ void send_words(unsigned address, uint4 a, unsigned barrier) {
  ON_CLUSTERS(asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(barrier)
      : "memory"));
}
// A number that another cluster writes meanwhile, in the cache that all share.
__device__ __forceinline__ float load_exchanged(const float* p) {
  float a;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(a) : "l"(p) : "memory");
  return a;
}
__device__ __forceinline__ unsigned short load_exchanged(const unsigned short* p) {
  unsigned short a;
  asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(a) : "l"(p) : "memory");
  return a;
}
#endif
// Whether it has not written it yet: no result has these bits, see ``bits_to_store``.
__device__ __forceinline__ bool is_missing(float a) { return bits_of(a) == EMPTY; }
__device__ __forceinline__ bool is_missing(unsigned short a) { return a == 0xffffu; }

// Shared memory: a barrier for each of two turns, terms of two turns, sums, the weights that registers do not hold.
struct Memory {
  unsigned long long* arrived;
  Words* terms;
  float* sums;
  Words* weights;
};
__device__ __forceinline__ Memory memory() {
  Memory m;
  m.arrived = (unsigned long long*)shared_memory();
  m.terms = (Words*)shared_memory() + 1;
  m.sums = (float*)(m.terms + 2 * TERMS);
  m.weights = (Words*)(m.sums + SUMS);
  return m;
}

struct Place { int rank, group, part, lane; };  // of the block in its cluster, of the warp among sums and among terms
__device__ __forceinline__ Place place() {
  const int warp = threadIdx.x / 32;
  return {(int)(blockIdx.x % CLUSTER), warp % WC, warp / WC, (int)(threadIdx.x % 32)};
}

// Which direction or layer a cluster is for, and which batch rows. Clusters of one of them lie side by side.
struct Part { i64 number, row0, rows; };
__device__ __forceinline__ Part part_of(i64 batch) {
  const i64 slices = (batch + SLICE - 1) / SLICE, cluster = blockIdx.x / CLUSTER;
  const i64 row0 = cluster % slices * SLICE;
  return {cluster / slices, row0, batch - row0 < SLICE ? batch - row0 : SLICE};
}

// Of four layers' tensors that of one.
template <class T> __device__ __forceinline__ T* chosen(int number, T* a, T* b, T* c, T* d) {
  return number == 0 ? a : number == 1 ? b : number == 2 ? c : d;
}
// A tensor that there may not be, from a number on.
__device__ __forceinline__ const Real* offset(const Real* p, i64 by) { return p == nullptr ? p : p + by; }

// All blocks of the cluster have come here.
__device__ __forceinline__ void meet_cluster() {
  arrive_cluster();
  wait_cluster();
}

// Where four words of a batch row's terms from ``term`` on lie, among the terms of a turn.
__device__ __forceinline__ int place_of(int row, int term) {
  return (term / CHUNK * ROWS + row) * 4 + term % CHUNK / WIDE;
}

// WEIGHT(sum, term) reads sixteen bytes: WIDE terms from ``term`` on of a sum.
struct Slice {
  Words held[HELD ? HELD : 1];
  const Words* left;

  template <class Weight> __device__ __forceinline__ void load(const Memory& m, const Weight& weight) {
    const Place at = place();
    left = m.weights;
#pragma unroll
    for (int i = 0; i < CW; ++i)
#pragma unroll
      for (int j = 0; j < CT; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int sum = (at.group * CT + j) * 16 + half * 8 + at.lane / 4, chunk = at.part * CW + i;
          const int term = chunk * CHUNK + at.lane % 4 * WIDE, number = (i * CT + j) * 2 + half;
          Words words = {{0, 0, 0, 0}};
          if (sum < COLUMNS && chunk < CK && term < DEPTH) words = weight(sum, term);
          if (number < HELD) held[number] = words;
          else m.weights[(number - HELD) * THREADS + threadIdx.x] = words;
        }
  }
  __device__ __forceinline__ Words at(int number) const {
    if (number < HELD) return held[number];
    return left[(number - HELD) * THREADS + threadIdx.x];
  }
};

// The product of a turn's terms with the weights of a warp. RESULT(tile, row tile, four sums) gets those of each tile of 16
// sums and 8 batch rows: of sum lane / 4 and the next batch rows lane % 4 * 2 and that after, then of the eighth sum after.
template <class Result>
__device__ __forceinline__ void multiply_terms(const Words* terms, const Slice& u, const Result& result) {
  const Place at = place();
  float sums[CT][RT][CHAINS][4] = {};
#pragma unroll
  for (int i = 0; i < CW; ++i) {
    const int chunk = at.part * CW + i;
    if (CW * WK != CK && chunk >= CK) break;
    Words b[RT];
#pragma unroll
    for (int r = 0; r < RT; ++r) b[r] = terms[(chunk * ROWS + r * 8) * 4 + at.lane];
#pragma unroll
    for (int j = 0; j < CT; ++j) {
      const Words above = u.at((i * CT + j) * 2), below = u.at((i * CT + j) * 2 + 1);
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        unsigned a[4] = {above.w[2 * s], below.w[2 * s], above.w[2 * s + 1], below.w[2 * s + 1]};
        if constexpr (REAL == 0) {
#pragma unroll
          for (int k = 0; k < 4; ++k) a[k] = opaque(a[k]);
        }
#pragma unroll
        for (int r = 0; r < RT; ++r) multiply(sums[j][r][(2 * i + s) % CHAINS], a, b[r].w[2 * s], b[r].w[2 * s + 1]);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < CT; ++j) {
    const int tile = at.group * CT + j;
    if (CT * WC != MT && tile >= MT) break;
#pragma unroll
    for (int r = 0; r < RT; ++r) {
#pragma unroll
      for (int chain = 1; chain < CHAINS; ++chain)
#pragma unroll
        for (int k = 0; k < 4; ++k) sums[j][r][0][k] += sums[j][r][chain][k];
      result(tile, r, sums[j][r][0]);
    }
  }
}

// Barriers that count the bytes of a turn that the blocks of the cluster send to this one.
struct Turns {
  unsigned bytes, phases;  // a bit for each turn: which phase of its barrier is next

  // All blocks come to ``meet_cluster`` before one sends.
  __device__ __forceinline__ Turns(const Memory& m, unsigned bytes) : bytes(bytes), phases(0) {
    if (threadIdx.x == 0) {
      for (int turn = 0; turn < 2; ++turn) barrier_init(m.arrived + turn, 1);
      barriers_ready();
      for (int turn = 0; turn < 2; ++turn) barrier_expect(m.arrived + turn, bytes);
    }
  }
  // Until all is there. What comes for this turn next is sent by blocks that have what this one sends later.
  __device__ __forceinline__ void wait(const Memory& m, int turn) {
    barrier_wait(m.arrived + turn, phases >> turn & 1);
    phases ^= 1u << turn;
    if (threadIdx.x == 0) barrier_expect(m.arrived + turn, bytes);
  }
};

// Numbers of WIDE neighbouring threads, for each of them.
__device__ __forceinline__ Words together(float value) {
  const unsigned bits = bits_to_store(value);
  const int first = threadIdx.x % 32 / WIDE * WIDE;
  Words all;
  if constexpr (REAL == 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) all.w[i] = __shfl_sync(~0u, bits, first + i);
  } else {
    const unsigned next = __shfl_sync(~0u, bits, (int)(threadIdx.x % 32) ^ 1);
    const unsigned both = threadIdx.x % 2 ? next | bits << 16 : bits | next << 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) all.w[i] = __shfl_sync(~0u, both, first + 2 * i);
  }
  return all;
}
__device__ __forceinline__ bool leads() { return threadIdx.x % WIDE == 0; }
