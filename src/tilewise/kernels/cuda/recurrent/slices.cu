// What both directions of a recurrent layer share: a block's slice of the weights, the product with what all blocks have
// written, and the exchange of results.
//
// CLUSTER blocks own UNITS hidden units each, for TILES tiles of ROWS batch rows, which are HIGH times those of a matrix
// unit, 16. A product's sum over DEPTH terms is divided among the blocks of the cluster: each reads its share of the terms alone, multiplies it by the weights of all units of
// the cluster, and sends the sums of each block's units into that block's shared memory. A barrier there counts the bytes
// that have come. So a multiprocessor reads a share of a step's numbers, and the weights that it holds are as many as
// without a cluster. They stay in registers and shared memory for all steps. Within a block WC groups of warps have different columns, WK groups different terms.
//
// The numbers of a step are exchanged among clusters through the tensors that hold them anyway. These are full of ones
// (EMPTY) at first, and four bytes of them are written at once, so a reader sees from a word by itself whether it is there:
// there is no flag, and no barrier among all blocks.

constexpr int THREADS = 32 * WC * WK;
constexpr int ROWS = 16 * HIGH;
constexpr int NT = (COLUMNS + 7) / 8;                                    // tiles of 8 columns of a block
constexpr int CT = (CLUSTER * NT + WC - 1) / WC;                         // of a warp, among all of the cluster
constexpr int CK = (DEPTH + CHUNK * CLUSTER - 1) / (CHUNK * CLUSTER);    // chunks of a block's share of the terms
constexpr int CW = (CK + WK - 1) / WK;                                   // of a warp
constexpr int WORDS = 64 * CK * HIGH;                                      // of sixteen bytes, of a tile's share
// Where no two warps need the same terms, each thread reads just those that it multiplies, and they skip shared memory.
constexpr bool DIRECT = WC == 1;
constexpr int LOADS = DIRECT ? 2 * CW * HIGH : (WORDS + THREADS - 1) / THREADS;  // of a thread
// Floats of a tile of 8 columns of sums, its rows one after another: with so many more that no bank is read twice.
constexpr int STRIDE = 8 * ROWS + (UNITS % 32 == 16 && COLUMNS != 4 * UNITS ? 16 : 8);
constexpr int SUMS = CLUSTER * WK * NT * STRIDE;                          // of a tile, by all blocks of the cluster
constexpr int SENT = CLUSTER * WK * NT * ROWS * 8 * 4;                   // bytes of them
constexpr int CHAINS = CT * HIGH < 3 ? 2 : 1;  // sums of a column tile that do not wait for each other
constexpr int OUTPUTS = ROWS * UNITS;                                    // of a tile
constexpr int EACH = (OUTPUTS + THREADS - 1) / THREADS;
constexpr int HELD = CW * CT < KEPT ? CW * CT : KEPT;                    // words of weights in a thread's registers

// Shared memory: a barrier for each of two tiles' sums, these, a tile's terms, the weights that registers do not hold.
struct Memory {
  unsigned long long* sent;
  float* sums;
  Words *terms, *weights;
};
__device__ __forceinline__ Memory memory() {
  Memory m;
  m.sent = (unsigned long long*)shared_memory();
  m.sums = (float*)shared_memory() + (CLUSTER > 1 ? 4 : 0);
  m.terms = (Words*)(m.sums + 2 * SUMS);
  m.weights = m.terms + (DIRECT ? 0 : WORDS);
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

// A warp's sums of 16 x 8 numbers, to ``to`` in block ``owner``: a thread has two neighbours of a row and two of the row
// that is eight below. Sent, neighbouring threads exchange two of them, so that each stores four at once.
__device__ __forceinline__ void put_sums(const Memory& m, int turn, int owner, float* to, const float (&sums)[4]) {
  const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
  if constexpr (CLUSTER == 1) {
    *(float2*)(to + row * 8 + column) = make_float2(sums[0], sums[1]);
    *(float2*)(to + (row + 8) * 8 + column) = make_float2(sums[2], sums[3]);
  } else {
    const bool odd = lane % 2;
    const float x = __shfl_xor_sync(~0u, odd ? sums[0] : sums[2], 1);
    const float y = __shfl_xor_sync(~0u, odd ? sums[1] : sums[3], 1);
    const float4 four = odd ? make_float4(x, y, sums[2], sums[3]) : make_float4(sums[0], sums[1], x, y);
    float* const mine = to + (odd ? row + 8 : row) * 8 + column / 4 * 4;
    send_cluster(peer_address<CLUSTER>(mine, owner), four, peer_address<CLUSTER>(m.sent + turn, owner));
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
struct Sums {
  const float* own;
  unsigned phases;  // a bit for each barrier: which of its phases is next

  // All blocks come to ``meet_cluster`` before one sends.
  __device__ __forceinline__ explicit Sums(const Memory& m) : own(m.sums), phases(0) {
    if constexpr (CLUSTER > 1)
      if (threadIdx.x == 0) {
        for (int turn = 0; turn < 2; ++turn) barrier_init(m.sent + turn, 1);
        barriers_ready();
      }
  }
  // Until all sums of a tile are there. Of two tiles in a row each has memory of its own: a block sends those of the next
  // but one when it has what all warps of the others sent for the next, which they do when they have read these.
  __device__ __forceinline__ void wait(const Memory& m, int turn) {
    if constexpr (CLUSTER == 1) __syncthreads();
    else {
      if (threadIdx.x == 0) barrier_expect(m.sent + turn, SENT);
      barrier_wait(m.sent + turn, phases >> turn & 1);
      phases ^= 1u << turn;
    }
  }
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

// All blocks of the cluster have come here.
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
  sums.wait(m, turn);
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
