// Enough of CUDA C++ to run one kernel on a CPU: each thread of a block is a coroutine, which runs to its next barrier
// and goes on when the others of its block or warp are there.
//
// Stands for ptx.cu, before a kernel's own source. Shared memory starts as NaN in every block. Threads run in ascending
// or descending order, so that a barrier that is missing shows in one of them.

#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#define EMULATED

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct Index { unsigned x; };
static thread_local Index threadIdx, blockIdx;
constexpr unsigned SHARED = 232448 / 16, MOST_CLUSTER = 16;
alignas(16) float4 shared[SHARED * MOST_CLUSTER];  // of the blocks of a cluster one after another

template <class T> T __ldcs(const T* p) {
  if (reinterpret_cast<std::uintptr_t>(p) % sizeof(T)) std::abort();  // as a GPU would
  return *p;
}
template <class T> void __stcs(T* p, T value) {
  if (reinterpret_cast<std::uintptr_t>(p) % sizeof(T)) std::abort();
  *p = value;
}
template <class T> T __ldg(const T* p) { return __ldcs(p); }
template <bool STREAM, class T> T load_if(bool wanted, const T* p) { return wanted ? __ldcs(p) : T{}; }
template <bool STREAM, class T> void store_if(bool wanted, T* p, T value) { if (wanted) __stcs(p, value); }
template <class T> void copy_async(T* to, const T* from) { *to = __ldcs(from); }
inline void wait_copies() {}

inline unsigned bits_of(float value) { unsigned bits; std::memcpy(&bits, &value, 4); return bits; }
inline float float_of(unsigned bits) { float value; std::memcpy(&value, &bits, 4); return value; }
inline float float_of_half(unsigned short bits) { _Float16 h; std::memcpy(&h, &bits, 2); return (float)h; }
inline unsigned short half_of_float(float value) { _Float16 h = (_Float16)value; unsigned short b; std::memcpy(&b, &h, 2); return b; }
inline float float_of_bfloat16(unsigned short bits) { return float_of((unsigned)bits << 16); }
inline unsigned short bfloat16_of_float(float value) {
  const unsigned bits = bits_of(value);
  return (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

namespace emulation {
constexpr std::size_t STACK = 1 << 16;
struct Thread { ucontext_t context; bool done; };
struct Barrier { unsigned arrived, passed; };
static std::vector<Thread> threads;
static char* stacks;  // of all threads, in memory that takes room where it was written
static std::size_t room;
static std::vector<Barrier> barriers;  // of each warp, then of the block
static std::vector<float> lanes;
static ucontext_t scheduler;
static void (*body)();
static unsigned running;
static bool moved;

// Opens a barrier that all threads from ``first`` to ``last`` that still run have come to.
inline void open(Barrier& barrier, unsigned first, unsigned last) {
  unsigned alive = 0;
  for (unsigned i = first; i < last; ++i) alive += !threads[i].done;
  if (barrier.arrived < alive || !alive) return;
  barrier.arrived = 0;
  ++barrier.passed;
}

inline void pause() { swapcontext(&threads[running].context, &scheduler); }

inline void wait(unsigned number, unsigned first, unsigned last) {
  Barrier& barrier = barriers[number];
  const unsigned passed = barrier.passed;
  ++barrier.arrived;
  open(barrier, first, last);
  moved = true;
  do pause();
  while (barrier.passed == passed);
  moved = true;
}

// Threads of a block; blocks of a cluster come one after another, from block ``origin`` of the grid on.
static unsigned each, origin;

struct Group { unsigned number, first, last; };  // a barrier and its threads
inline Group block_of(unsigned i) {
  const unsigned warps = (each + 31) / 32, b = i / each;
  return {b * (warps + 1) + warps, b * each, b * each + each};
}
inline Group warp_of(unsigned i) {
  const Group all = block_of(i);
  const unsigned warp = i % each / 32, first = all.first + 32 * warp;
  return {all.number - (each + 31) / 32 + warp, first, std::min(first + 32, all.last)};
}
inline Group cluster() { return {(unsigned)barriers.size() - 1, 0, (unsigned)threads.size()}; }
inline void wait(const Group& group) { wait(group.number, group.first, group.last); }
inline void open(const Group& group) { open(barriers[group.number], group.first, group.last); }

static void start() {
  body();
  threads[running].done = moved = true;
  open(warp_of(running));
  open(block_of(running));
  open(cluster());
  pause();
}

// What a launch held. Every kernel is a library of its own that stays loaded, so that all of them would add up.
static void release() {
  if (stacks) munmap(stacks, room);
  stacks = nullptr, room = 0;
  std::vector<Thread>().swap(threads);
  std::vector<float>().swap(lanes);
  const auto page = (std::uintptr_t)sysconf(_SC_PAGESIZE), first = ((std::uintptr_t)shared + page - 1) / page * page;
  const std::uintptr_t end = ((std::uintptr_t)shared + sizeof(shared)) / page * page;
  madvise((void*)first, end - first, MADV_DONTNEED);
}

// Room for the stacks of ``count`` threads.
static void reserve(unsigned count) {
  if (room >= count * STACK) return;
  if (stacks) munmap(stacks, room);
  room = count * STACK;
  void* found = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) std::abort();
  stacks = (char*)found;
}

// Blocks ``number`` to ``number + blocks`` of ``count`` threads, at a time.
inline void block(unsigned number, unsigned count, unsigned blocks, bool backwards) {
  each = count, origin = number;
  for (unsigned i = 0; i < SHARED * blocks; ++i) shared[i] = {NAN, NAN, NAN, NAN};
  threads.resize(count * blocks);
  barriers.assign(((count + 31) / 32 + 1) * blocks + 1, {0, 0});
  lanes.assign(count * blocks, NAN);
  reserve(count * blocks);
  for (std::size_t i = 0; i < threads.size(); ++i) {
    Thread& thread = threads[i];
    thread.done = false;
    getcontext(&thread.context);
    thread.context.uc_stack = {stacks + i * STACK, 0, STACK};
    makecontext(&thread.context, start, 0);
  }
  for (bool any = true; any;) {
    any = moved = false;
    for (unsigned i = 0; i < count * blocks; ++i) {
      running = backwards ? count * blocks - 1 - i : i;
      if (threads[running].done) continue;
      threadIdx.x = running % count;
      blockIdx.x = number + running / count;
      swapcontext(&scheduler, &threads[running].context);
      any = true;
    }
    if (any && !moved) std::abort();  // all wait for each other
  }
}
}  // namespace emulation

inline void __syncthreads() { emulation::wait(emulation::block_of(emulation::running)); }
inline void __syncwarp() { emulation::wait(emulation::warp_of(emulation::running)); }

inline float4* shared_memory() { return shared + emulation::running / emulation::each * SHARED; }
inline void arrive_cluster() {}
inline void wait_cluster() { emulation::wait(emulation::cluster()); }
inline unsigned cluster_address(const void* p, unsigned rank) {
  const std::size_t offset = (const char*)p - (const char*)shared_memory();
  if (offset >= SHARED * sizeof(float4)) std::abort();
  return rank * SHARED * sizeof(float4) + offset;
}
template <class T> void store_cluster(unsigned address, T value) {
  if (address % sizeof(T)) std::abort();
  std::memcpy((char*)shared + address, &value, sizeof(T));
}

// All threads of a warp have to come here, as the mask says.
inline unsigned __shfl_sync(unsigned mask, unsigned value, int lane);
inline float __shfl_sync(unsigned mask, float value, int lane) {
  const unsigned me = emulation::running;
  const emulation::Group warp = emulation::warp_of(me);
  if (mask != ~0u || warp.last - warp.first < 32 || lane < 0 || lane > 31) std::abort();
  emulation::lanes[me] = value;
  emulation::wait(warp);
  value = emulation::lanes[warp.first + lane];
  emulation::wait(warp);
  return value;
}
inline float __shfl_xor_sync(unsigned mask, float value, int other) {
  return __shfl_sync(mask, value, (emulation::running % emulation::each % 32) ^ other);
}

// What stands for barriers.cu and matrix_units.cu. Copies and products are done at once; a barrier in shared memory is its own state.
using std::max;
using std::min;
struct Phase { unsigned short arrivals, missing, parity, expected; };  // bytes that are expected, in eights; below zero where they came first
static_assert(sizeof(Phase) == 8);
inline Phase& phase(unsigned long long* barrier) { return *(Phase*)barrier; }
inline unsigned shared_address(const void* p) { return (unsigned)((const char*)p - (const char*)shared_memory()); }
inline void barrier_init(unsigned long long* barrier, unsigned arrivals) {
  phase(barrier) = {(unsigned short)arrivals, (unsigned short)arrivals, 0, 0};
}
inline void barriers_ready() {}
inline void barrier_done(unsigned long long* barrier) {
  Phase& now = phase(barrier);
  if (now.missing || now.expected) return;
  now.missing = now.arrivals;
  now.parity ^= 1;
  emulation::moved = true;
}
inline void barrier_arrive(unsigned long long* barrier) {
  if (!phase(barrier).missing) std::abort();
  --phase(barrier).missing;
  emulation::moved = true;
  barrier_done(barrier);
}
inline void barrier_expect(unsigned long long* barrier, unsigned bytes) {
  phase(barrier).expected += bytes / 8;
  barrier_arrive(barrier);
}
inline void barrier_wait(unsigned long long* barrier, unsigned parity) {
  while (phase(barrier).parity == parity) emulation::pause();
  emulation::moved = true;
}
inline void copy_bulk(void* to, const void* from, unsigned bytes, unsigned long long* barrier) {
  if (bytes % 16 || (std::uintptr_t)to % 16 || (std::uintptr_t)from % 16) std::abort();
  std::memcpy(to, from, bytes);
  phase(barrier).expected -= bytes / 8;
  barrier_done(barrier);
}
inline void send_cluster(unsigned address, float4 value, unsigned barrier) {
  store_cluster(address, make_float2(value.x, value.y));
  store_cluster(address + 8, make_float2(value.z, value.w));
  unsigned long long* there = (unsigned long long*)((char*)shared + barrier);
  phase(there).expected -= 2;
  barrier_done(there);
}
inline void send_words(unsigned address, uint4 value, unsigned barrier) {
  store_cluster(address, value);
  unsigned long long* there = (unsigned long long*)((char*)shared + barrier);
  phase(there).expected -= 2;
  barrier_done(there);
}
inline void copy_or_zero(float* to, const float* from, bool wanted) { *to = wanted ? __ldcs(from) : 0.f; }
inline void fence_for_units() {}
inline void units_begin() {}
inline void units_commit() {}
inline void units_wait() { __syncwarp(); }
template <int COUNT> void more_registers() {}
template <int COUNT> void fewer_registers() {}
// One barrier of some threads of a block that is alone in its cluster.
inline void meet(int number, int threads) {
  static unsigned arrived[16], passed[16];
  const unsigned now = passed[number];
  emulation::moved = true;
  if (++arrived[number] == (unsigned)threads) {
    arrived[number] = 0;
    ++passed[number];
  }
  while (passed[number] == now) emulation::pause();
  emulation::moved = true;
}
inline unsigned two_halves(float low, float high) { return half_of_float(low) | (unsigned)half_of_float(high) << 16; }
inline void from_halves(unsigned both, float& low, float& high) {
  low = float_of_half((unsigned short)both);
  high = float_of_half((unsigned short)(both >> 16));
}
inline int kept(int number) { return number; }
template <int COUNT> void begin_sums(float (&sums)[COUNT]) { for (float& sum : sums) sum = NAN; }
template <int COUNT> void keep_sums(float (&)[COUNT]) {}
// Numbers of 64 x 2 COUNT sums as a thread of a warpgroup holds them, by the descriptors of both operands. KIND is 1 for
// fp16, 2 for bf16.
namespace emulation {
template <int KIND> float half_number(unsigned short bits) { return KIND == 1 ? float_of_half(bits) : float_of_bfloat16(bits); }
template <int KIND> float described(unsigned long long operand, int row, int k) {
  const unsigned from = (operand & 0x3fff) << 4, depth = (operand >> 16 & 0x3fff) << 4, rows = (operand >> 32 & 0x3fff) << 4;
  unsigned short bits;
  const unsigned at = from + row / 8 * rows + row % 8 * 16 + k / 8 * depth + k % 8 * 2;
  if (at + 2 > SHARED * 16) std::abort();
  std::memcpy(&bits, (const char*)shared_memory() + at, 2);
  return half_number<KIND>(bits);
}
template <int KIND, int COUNT, class First> void multiply_rows(float (&sums)[COUNT], const First& first, unsigned long long b, bool add) {
  for (int i = 0; i < COUNT; ++i) {
    const int column = threadIdx.x % 4 * 2 + i / 4 * 8 + i % 2;
    float sum = add ? sums[i] : 0.f;
    for (int k = 0; k < 16; ++k) sum += first(i / 2 % 2, k) * described<KIND>(b, column, k);
    sums[i] = sum;
  }
}
template <int KIND, int COUNT> void multiply(float (&sums)[COUNT], unsigned long long a, unsigned long long b, bool add) {
  const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  multiply_rows<KIND>(sums, [=](int half, int k) { return described<KIND>(a, row + 8 * half, k); }, b, add);
}
// The same with the first operand in registers: those of a row's four threads.
template <int KIND, int COUNT> void multiply(float (&sums)[COUNT], const unsigned (&a)[4], unsigned long long b, bool add) {
  struct Held { unsigned a[4]; };
  static std::vector<Held> all;
  const unsigned me = running, quad = me / 4 * 4;
  const Group warp = warp_of(me);
  all.resize(threads.size());
  all[me] = {{a[0], a[1], a[2], a[3]}};
  wait(warp);
  multiply_rows<KIND>(sums, [=](int half, int k) {
    const unsigned word = all[quad + k % 8 / 2].a[half + k / 8 * 2];
    return half_number<KIND>((unsigned short)(word >> k % 2 * 16));
  }, b, add);
  wait(warp);
}
}  // namespace emulation

// What stands for units.cu of recurrent layers. A block that finds nothing new lets the others run.
inline unsigned __shfl_sync(unsigned mask, unsigned value, int lane) {
  return bits_of(__shfl_sync(mask, float_of(value), lane));
}
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline uint4 load_relaxed(const void* p) {
  const uint4 found = __ldcs((const uint4*)p);
  emulation::moved |= found.w != ~0u;  // else it is not there yet
  return found;
}
template <class T> T load_exchanged(const T* p) {
  const T found = __ldcs(p);
  unsigned bits = ~0u;
  std::memcpy(&bits, &found, sizeof(T));
  emulation::moved |= bits != ~0u;  // else it is not there yet
  return found;
}
inline void store_relaxed(void* p, uint4 a) { __stcs((uint4*)p, a); emulation::moved = true; }
// Of a grid all of whose blocks run at a time, clusters of SIZE blocks follow each other.
template <int SIZE> unsigned peer_address(const void* p, int rank) {
  return cluster_address(p, (blockIdx.x - emulation::origin) / SIZE * SIZE + rank);
}
inline unsigned opaque(unsigned bits) { return bits; }
inline void look_again() { emulation::pause(); }
struct Fragments { unsigned a[4], b[2]; };
template <int KIND> void multiply_units(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  static std::vector<Fragments> all;
  const unsigned me = emulation::running, lane = me % emulation::each % 32;
  const emulation::Group warp = emulation::warp_of(me);
  all.resize(emulation::threads.size());
  all[me] = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
  emulation::wait(warp);
  const auto number = [](unsigned word, int i) {
    const unsigned short bits = (unsigned short)(word >> 16 * i);
    return KIND == 0 ? float_of(word & 0xffffe000u) : KIND == 1 ? float_of_half(bits) : float_of_bfloat16(bits);
  };
  for (int i = 0; i < 4; ++i) {
    const unsigned row = lane / 4, column = lane % 4 * 2 + i % 2;
    for (int q = 0; q < 4; ++q)  // which thread of a row or column holds the terms
      for (int half = 0; half < 2; ++half)
        for (int k = 0; k < (KIND ? 2 : 1); ++k)
          sums[i] += number(all[warp.first + row * 4 + q].a[2 * half + i / 2], k) *
                     number(all[warp.first + column * 4 + q].b[half], k);
  }
  emulation::wait(warp);
}
