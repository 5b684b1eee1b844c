// What blocks of a recurrent layer's kernel exchange: the numbers of a step, and parts of sums.
//
// CLUSTER blocks own UNITS hidden units each, for TILES tiles of ROWS batch rows, which are HIGH times 16. A product's sum
// over DEPTH terms is divided among the blocks of the cluster: each reads its share of the terms alone, multiplies it by
// the weights of all units of the cluster, and sends the sums of each block's units into that block's shared memory. A
// barrier there counts the bytes that have come. So a multiprocessor reads a share of a step's numbers, and the weights
// that it holds are as many as without a cluster. They stay in registers and shared memory for all steps. What multiplies
// in a block is divided as well: WC groups have different columns, WK groups different terms.
//
// The numbers of a step are exchanged among clusters through the tensors that hold them anyway. These are full of ones
// (EMPTY) at first, and four bytes of them are written at once, so a reader sees from a word by itself whether it is there:
// there is no flag, and no barrier among all blocks.

constexpr int ROWS = 16 * HIGH;
constexpr int NT = (COLUMNS + 7) / 8;                                  // tiles of 8 columns of a block
constexpr int CK = (DEPTH + CHUNK * CLUSTER - 1) / (CHUNK * CLUSTER);  // chunks of a block's share of the terms
constexpr int WORDS = 4 * ROWS * CK;                                   // of sixteen bytes, of a tile's share
constexpr int SENT = CLUSTER * WK * NT * ROWS * 8 * 4;                 // bytes of a tile's sums that come to a block
constexpr int OUTPUTS = ROWS * UNITS;                                  // of a tile
constexpr int EACH = (OUTPUTS + THREADS - 1) / THREADS;

// A number as it was read. Of two in one register both are waited for when the second comes, so a thread with several units
// has one register for each. With one unit that made steps 10 % slower.
template <bool APART> struct Read { using type = Real; };
template <> struct Read<true> { using type = unsigned; };
using Bits = typename Read<(EACH > 1 && REAL != 0)>::type;

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
  m.weights = m.terms + TERMS;
  return m;
}

// Of the block in its cluster; of the TEAM threads that multiply together, among columns and among terms; in them.
struct Place { int rank, group, part, lane; };
__device__ __forceinline__ Place place() {
  const int team = threadIdx.x / TEAM;
  return {(int)(blockIdx.x % CLUSTER), team % WC, team / WC, (int)(threadIdx.x % TEAM)};
}

// Where the words lie that a thread reads, told by what multiplies them: row and term of its word ``i``, and whether there
// is one.
__device__ __forceinline__ int row_of(int i);
__device__ __forceinline__ int term_of(int i);
__device__ __forceinline__ bool exists(int i);

// A thread's words of a tile's terms, COUNT from ``first`` on.
template <int COUNT> struct Fetched { Words words[COUNT]; };

// SOURCE(row, term) is the address of sixteen bytes.
template <class Source, int COUNT>
__device__ __forceinline__ void fetch(Fetched<COUNT>& to, const Source& source, int first = 0) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    to.words[i] = {{0, 0, 0, 0}};
    if (exists(first + i)) to.words[i] = load_shared_words(source(row_of(first + i), term_of(first + i)));
  }
}

__device__ __forceinline__ bool missing_in(const Words& a) {
  return a.w[0] == EMPTY || a.w[1] == EMPTY || a.w[2] == EMPTY || a.w[3] == EMPTY;
}

// Loads again what was not there. ``exchanged``: other blocks write it meanwhile.
template <class Source, int COUNT>
__device__ __forceinline__ void settle(Fetched<COUNT>& to, const Source& source, bool exchanged, int first = 0) {
  if (!exchanged) return;
#pragma unroll 1
  for (bool missing = true; missing;) {
    missing = false;
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      if (missing_in(to.words[i])) {
        to.words[i] = load_shared_words(source(row_of(first + i), term_of(first + i)));
        missing = true;
      }
    if (missing) look_again();
  }
}

// All blocks of the cluster have come here.
__device__ __forceinline__ void meet_cluster() {
  if constexpr (CLUSTER == 1) __syncthreads();
  else {
    arrive_cluster();
    wait_cluster();
  }
}

// Tells when the sums of a tile are there, by a barrier for each of two tiles in a row.
struct Arrivals {
  unsigned phases;  // a bit for each barrier: which of its phases is next

  // All blocks come to ``meet_cluster`` before one sends.
  __device__ __forceinline__ explicit Arrivals(unsigned long long* sent) : phases(0) {
    if constexpr (CLUSTER > 1)
      if (threadIdx.x == 0) {
        for (int turn = 0; turn < 2; ++turn) barrier_init(sent + turn, 1);
        barriers_ready();
      }
  }
  // Of two tiles in a row each has memory of its own: a block sends those of the next but one when it has what all warps
  // of the others sent for the next, which they do when they have read these.
  __device__ __forceinline__ void wait(unsigned long long* sent, int turn) {
    if constexpr (CLUSTER == 1) __syncthreads();
    else {
      if (threadIdx.x == 0) barrier_expect(sent + turn, SENT);
      barrier_wait(sent + turn, phases >> turn & 1);
      phases ^= 1u << turn;
    }
  }
};

// Two pairs of neighbours among the sums of a thread, a pair of each of two rows. Threads of even and of odd number
// exchange one pair, so that an even one gets four of the first row, an odd one four of the second.
__device__ __forceinline__ float4 four_of(const float (&sums)[4]) {
  const bool odd = threadIdx.x % 2;
  const float x = __shfl_xor_sync(~0u, odd ? sums[0] : sums[2], 1);
  const float y = __shfl_xor_sync(~0u, odd ? sums[1] : sums[3], 1);
  return odd ? make_float4(x, y, sums[2], sums[3]) : make_float4(sums[0], sums[1], x, y);
}
// To ``to`` in block ``owner`` of the cluster, which ``barrier`` there is told.
__device__ __forceinline__ void give(float* to, const float4& four, int owner, unsigned long long* barrier) {
  if constexpr (CLUSTER == 1) *(float4*)to = four;
  else send_cluster(peer_address<CLUSTER>(to, owner), four, peer_address<CLUSTER>(barrier, owner));
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
