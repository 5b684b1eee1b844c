// 2-D Fourier transforms of many small real planes, N1 x N2, each way in one pass over memory.
//
// What fft2d.py writes above this, all of it known when the kernel is compiled:
//   N1, N2            rows and columns of the transform, multiples of 8
//   SPLIT1, SPLIT2    threads that share one transform down a column (of N1 points) and along a row (of N2)
//   PLANES, THREADS   planes of a thread block (of a cluster of blocks), threads of a block
//   CLUSTER           blocks that share the columns and the rows of their planes, 1 for a plain spectrum
//   PLANE_PAD         extra room between planes in shared memory, in 16 bytes
//   PADDED            the image is smaller than N1 x N2, so that accesses have to be masked
//   VECTOR            images are accessed two neighbouring columns at a time
//   IMAGE_PLANES_FIRST, SPECTRUM_PLANES_FIRST    neighbouring threads take neighbouring planes there, not columns, rows
//   LAYOUT            of the spectrum: PLAIN, FREQUENCY_MAJOR or PACKED
//   PEAKS             each block also says what the largest magnitude is that it met
//   PARTS             1: spectra are complex64; 2 or 4: so many fp16 parts of that, scaled
//   ALIGNED           a plain spectrum may be accessed 16 bytes at a time
//   FLAT              plain spectra follow each other without a gap, in both memories
//   transform1, transform2, rotate1, rotate2     codelets
//
// Forward. (1) A thread loads two real columns a and b as one complex column a + ib, transforms it in registers and
// separates: A[k] = (Z[k] + Z*[N1-k]) / 2, B[k] = (Z[k] - Z*[N1-k]) / 2i. Half of the frequencies say everything, so
// there are N1/2 rows: row 0 is real for real data and takes the equally real row N1/2 as its imaginary part. The
// factor 1/2 waits for (3). (2) Through shared memory a thread gets one row and transforms that. (3) Row k gives
// Y[k, :], and by Hermitian symmetry Y[N1-k, :]; row 0 separates as in (1). A plain spectrum passes through shared
// memory once more, so that it is stored in one piece. Inverse: the same backwards.
//
// Both real columns belong to one plane, so planes stay independent: any number of them, and what is not finite in one
// does not reach another (two planes as one complex plane, as in Vasilache et al. 2014, share both).
//
// A CLUSTER of blocks takes more planes than one block's shared memory holds, as pieces of memory are written that have 8
// bytes times PLANES: each block has its share of the columns and its share of the rows, and what it finds for the rows or
// columns of another it stores there.
//
// SPLIT 2 halves registers where a column has too many points: one thread takes the even frequencies, one the odd ones.
// Each reads all points, and a first radix-2 step while reading leaves a transform of half as many. Rows of spectra, which
// memory holds in small pieces, are read once: one thread takes the even numbers, one the odd ones, and they exchange halves
// of their transforms in registers.

constexpr int ROWS = N1 / 2, COLUMNS = N2 / 2, HALF = N2 / 2 + 1;
constexpr int M1 = N1 / SPLIT1, M2 = N2 / SPLIT2;
// Shared memory holds pairs of complex numbers: of HELD_COLUMNS columns and HELD_ROWS rows, which in a cluster are those of
// the block's second step. One more than an even number of columns is odd, so that 16-byte accesses meet all banks along
// rows and down columns. A plane of ROWS rows of COLUMNS + 1 is exactly as large as its plain spectrum.
constexpr int PITCH = HELD_COLUMNS + 1, PLANE = HELD_ROWS * PITCH + PLANE_PAD;
constexpr bool ONE_WARP = !IMAGE_PLANES_FIRST && !SPECTRUM_PLANES_FIRST && SPLIT1 == 1 && SPLIT2 == 1 && N1 == N2 &&
                          ROWS <= 32 && 32 % ROWS == 0 && CLUSTER == 1;

// Whether the threads that share a plane are of one warp decides what they wait for.
__device__ __forceinline__ void synchronize() {
  if constexpr (ONE_WARP) __syncwarp();
  else __syncthreads();
}

__device__ __forceinline__ int rank() { return CLUSTER == 1 ? 0 : blockIdx.x % CLUSTER; }

// Which plane of the cluster, which of its ALL columns or rows, which of those that this block has, and which part of that
// transform this thread has.
struct Place {
  int slot, lane, held, part;
};

// PAIRED: two threads that share a transform are neighbours.
template <int ALL, bool PLANES_FIRST, bool PAIRED = false> __device__ __forceinline__ Place place() {
  constexpr int LANES = ALL / CLUSTER;
  const int t = threadIdx.x, part = PAIRED ? t % 2 + t / (2 * PLANES * LANES) * 2 : t / (PLANES * LANES);
  const int rest = PAIRED ? t / 2 % (PLANES * LANES) : t - part * (PLANES * LANES);
  const int slot = PLANES_FIRST ? rest % PLANES : rest / LANES, held = PLANES_FIRST ? rest / PLANES : rest % LANES;
  return {slot, rank() * LANES + held, held, part};
}

// Whether all threads of a block work in a step with so many columns or rows and threads for each.
constexpr bool all_work(int all, int split) { return THREADS == PLANES * (all / CLUSTER) * split; }

__device__ __forceinline__ unsigned first_plane() { return blockIdx.x / CLUSTER * (unsigned)PLANES; }

// Between the steps, after which what other blocks found for this one is here.
__device__ __forceinline__ void exchange() {
  if constexpr (CLUSTER == 1) synchronize();
  else arrive_cluster(), wait_cluster();
}

// The same place in the shared memory of every block of the cluster.
template <class T> struct Everywhere {
  T* here;
  unsigned there[CLUSTER];
  __device__ __forceinline__ explicit Everywhere(T* p) : here(p) {
    if constexpr (CLUSTER > 1) {
#pragma unroll
      for (int i = 0; i < CLUSTER; ++i) there[i] = cluster_address(p, i);
    }
  }
  __device__ __forceinline__ void store(int block, int index, T value) const {
    if (CLUSTER == 1 || block == rank()) here[index] = value;
    else store_cluster(there[block] + index * (unsigned)sizeof(T), value);
  }
  // In one place or the other; both are known when this is compiled.
  __device__ __forceinline__ void store(bool other, int block, int index, int other_block, int other_index, T value) const {
    const int i = other ? other_index : index;
    if (CLUSTER == 1 || (other ? other_block : block) == rank()) here[i] = value;
    else store_cluster((other ? there[other_block] : there[block]) + i * (unsigned)sizeof(T), value);
  }
};

// The two columns of pair number ``lane``: neighbours, or half a row apart, so that single accesses stay coalesced.
__device__ constexpr int column0(int lane) { return VECTOR ? 2 * lane : lane; }
__device__ constexpr int column1(int lane) { return VECTOR ? 2 * lane + 1 : lane + COLUMNS; }

// Where the image lies inside the N1 x N2 plane; strides in elements.
struct Window {
  i64 row, column;
  int height, width, top, left;
  __device__ __forceinline__ bool has_row(int h) const { return !PADDED || (unsigned)(h - top) < (unsigned)height; }
  __device__ __forceinline__ bool has_column(int w) const { return !PADDED || (unsigned)(w - left) < (unsigned)width; }
  // Of column w, as if the window went on beyond the image.
  __device__ __forceinline__ i64 above(int w) const {
    return PADDED ? column * (w - left) - row * top : column * w;
  }
};

// Where row k of a spectrum lies: its frequency w at first[w * step], and what belongs to it by symmetry at
// second[w * second_step]: frequency w of row N1-k, or where a row is kept whole (PACKED) its own frequency N2-w.
template <class T> struct Rows {
  T *first, *second;
  i64 step, second_step;
  // ``y``: the plane's spectrum; ``step``: from one frequency to the next.
  __device__ __forceinline__ Rows(T* y, int k, i64 step) : step(step), second_step(step) {
    if constexpr (LAYOUT == PACKED) {
      first = y + step * (k * N2);
      second = k == 0 ? y + step * COLUMNS : first + step * N2;
      if (k) second_step = -step;
    } else {
      first = y + step * (k * HALF);
      second = y + step * ((k == 0 ? ROWS : N1 - k) * HALF);
    }
  }
  __device__ __forceinline__ T* own(int w) const { return first + step * w; }
  __device__ __forceinline__ T* mirrored(int w) const { return second + second_step * w; }
};

// A plain spectrum as it is copied between memories, PIECES by the EACH threads of a plane.
template <bool WIDE> struct Pieces { using type = float2; };
template <> struct Pieces<true> { using type = float4; };
using Piece = typename Pieces<ALIGNED>::type;
constexpr int PIECES = N1 * HALF * (int)sizeof(float2) / (int)sizeof(Piece), EACH = THREADS / PLANES;

// Flat spectra are copied by all threads that wait for each other, so that as long pieces as possible are written at once.
constexpr int GROUP = ONE_WARP ? 32 : THREADS, GROUP_PLANES = ONE_WARP ? 32 / ROWS : PLANES;
