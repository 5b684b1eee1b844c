// From planes through sums of products with others' spectra to planes; depthwise2d.cu says how.
//
// A block takes some planes of the result and a share of what is summed to them. Threads of a row hold RESULTS sums for
// each, in registers, or where those are too few (KEEP) in shared memory, and go back once. The others' spectra lie in
// the order of depthwise2d_filter.cu, ``results`` for each number of the sum; planes of a block meet them in the cache.
//
// Shared memory holds rows twice over: columns of the next plane are transformed while others still read the last one's.

template <int PART, class Sums>
__device__ __forceinline__ void add_edge(const float2 (&r)[M2], const float2* f, const float2* g, Sums& sum) {
#pragma unroll
  for (int i = 0; i <= M2 / 2; ++i) {
    const int m = mate<PART>(i);
    if (i > m) continue;
    float2 low, high;
    pair_product<(CORRELATE != 0)>(r[i], r[m], __ldg(f + i * ROW_THREADS), __ldg(g + i * SPLIT2), low, high);
    sum[i] = add(sum[i], low);
    if (m != i) sum[m] = add(sum[m], high);
  }
}

template <class Sums>
__device__ __forceinline__ void add_row(const float2 (&r)[M2], const float2* spectrum, const Seat& me, Sums& sum) {
  const float2 *f = spectrum + me.lane * SPLIT2 + me.part, *g = spectrum + M2 * ROW_THREADS + me.part;
  if (me.lane == 0) {
    if (SPLIT2 > 1 && me.part) add_edge<SPLIT2 - 1>(r, f, g, sum);
    else add_edge<0>(r, f, g, sum);
  } else {
#pragma unroll
    for (int i = 0; i < M2; ++i) sum[i] = plus_product<(CORRELATE != 0)>(sum[i], r[i], __ldg(f + i * ROW_THREADS));
  }
}

extern "C" __global__ void BOUNDS depthwise2d_summed(const Real* __restrict__ x, const float2* __restrict__ spectra,
                                                     Result* __restrict__ y, i64 planes, i64 depth, i64 results,
                                                     i64 shares, i64 x_plane, i64 x_depth, i64 x_row, i64 x_column,
                                                     i64 y_share, i64 y_plane, i64 y_result, i64 y_row, i64 y_column) {
  extern __shared__ float4 shared[];
  float2* s = (float2*)shared;
  // Blocks that read the same planes for other results are neighbours.
  const unsigned groups = ((unsigned)results + RESULTS - 1) / RESULTS, group = blockIdx.x % groups;
  const unsigned blocks = ((unsigned)planes + PLANES - 1) / PLANES, rest = blockIdx.x / groups, share = rest / blocks;
  const unsigned first = (rest - share * blocks) * PLANES;
  const i64 result = (i64)group * RESULTS;
  const Seat me = row_seat();
  const int seat = me.slot * PLANE + me.lane * PITCH;
  Sum<(KEEP != 0)> sums[RESULTS];
#pragma unroll
  for (int j = 0; j < RESULTS; ++j)
    sums[j].clear(s + 2 * PLANES * PLANE + j * M2 * PLANES * ROW_THREADS + me.slot * ROW_THREADS + me.lane * SPLIT2 +
                  me.part);
  const i64 begin = depth * share / shares, end = depth * (share + 1) / shares;
  for (i64 k = begin; k < end; ++k) {
    float2* buffer = s + (k - begin) % 2 * (PLANES * PLANE);
    columns_forward<A>(x + k * x_depth, {x_row, x_column},
                       [&](int slot) { return start(first + slot, planes, planes, 0, x_plane).offset; }, buffer);
    __syncthreads();
    if (!me.works) continue;
    float2 r[M2];
    row_forward<A>(buffer + seat, me.part, r);
#pragma unroll
    for (int j = 0; j < RESULTS; ++j) {
      const i64 number = RESULTS == 1 || result + j < results ? result + j : results - 1;
      add_row(r, spectra + (k * results + number) * SPECTRUM, me, sums[j]);
    }
  }
#pragma unroll
  for (int j = 0; j < RESULTS; ++j) {
    if (j > 0)  // columns of the sum before are still read; the first one's row is the thread's own
      __syncthreads();
    if (row_warp()) {
      float2 r[M2];
#pragma unroll
      for (int i = 0; i < M2; ++i) r[i] = sums[j][i];
      row_inverse<C>(r, me, s + seat);
    }
    __syncthreads();
    columns_inverse<C>(s, y, {y_row, y_column}, [&](int slot) {
      const Start to = start(first + slot, planes, planes, 0, y_plane);
      return Start{to.offset + share * y_share + (result + j) * y_result, to.exists && result + j < results};
    });
  }
}
