// From planes of images and of output gradients to gradients of filters; depthwise2d.cu says how.
//
// A block takes channels and a share of the images, sums the products of their spectra and goes back once. The threads
// of a row keep an image's spectrum in shared memory, each its own numbers, until the output gradient's is there, and
// the sum in registers, or where those are too few (KEEP) in shared memory as well.

template <int PART, class Sums>
__device__ __forceinline__ void add_edge(const float2 (&r)[M2], const float2* kept, Sums& sum) {
#pragma unroll
  for (int i = 0; i <= M2 / 2; ++i) {
    const int m = mate<PART>(i);
    if (i > m) continue;
    float2 all, rest, low, high;
    halves(r[i], r[m], all, rest);
    pair_product<true>(kept[i * PLANES * ROW_THREADS], kept[m * PLANES * ROW_THREADS], all, rest, low, high);
    sum[i] = add(sum[i], low);
    if (m != i) sum[m] = add(sum[m], high);
  }
}

extern "C" __global__ void BOUNDS depthwise2d_gradient(const Real* __restrict__ x, const Real* __restrict__ y,
                                                       Result* __restrict__ w, i64 channels, i64 images, i64 shares,
                                                       i64 x_channel, i64 x_image, i64 x_row, i64 x_column,
                                                       i64 y_channel, i64 y_image, i64 y_row, i64 y_column, i64 w_share,
                                                       i64 w_channel, i64 w_row, i64 w_column, double scale) {
  extern __shared__ float4 shared[];
  float2* s = (float2*)shared;
  const unsigned blocks = ((unsigned)channels + PLANES - 1) / PLANES, share = blockIdx.x / blocks;
  const unsigned first = (blockIdx.x - share * blocks) * PLANES;
  const Seat me = row_seat();
  const bool rows = row_warp();
  float2 *row = s + me.slot * PLANE + me.lane * PITCH;
  float2* kept = s + PLANES * PLANE + (me.slot * ROW_THREADS + me.lane * SPLIT2 + me.part);
  Sum<(KEEP != 0)> sum;
  sum.clear(kept + M2 * PLANES * ROW_THREADS);
  const i64 end = images * (share + 1) / shares;
  for (i64 n = images * share / shares; n < end; ++n) {
    const auto from = [&](i64 channel, i64 image) {
      return [=](int slot) { return start(first + slot, channels, channels, 0, channel).offset + n * image; };
    };
    columns_forward<A>(x, {x_row, x_column}, from(x_channel, x_image), s);
    __syncthreads();
    if (me.works) {
      float2 r[M2];
      row_forward<A>(row, me.part, r);
#pragma unroll
      for (int i = 0; i < M2; ++i) kept[i * PLANES * ROW_THREADS] = r[i];
    }
    __syncthreads();
    columns_forward<B>(y, {y_row, y_column}, from(y_channel, y_image), s);
    __syncthreads();
    if (me.works) {
      float2 r[M2];
      row_forward<B>(row, me.part, r);
      if (me.lane == 0) {
        if (SPLIT2 > 1 && me.part) add_edge<SPLIT2 - 1>(r, kept, sum);
        else add_edge<0>(r, kept, sum);
      } else {
#pragma unroll
        for (int i = 0; i < M2; ++i) sum[i] = plus_product<true>(sum[i], kept[i * PLANES * ROW_THREADS], r[i]);
      }
    }
    __syncthreads();
  }
  if (rows) {
    const float factor = me.lane == 0 ? (float)scale : 0.25f * (float)scale;
    float2 r[M2];
#pragma unroll
    for (int i = 0; i < M2; ++i) r[i] = scaled(factor, sum[i]);
    row_inverse<C>(r, me, row);
  }
  __syncthreads();
  columns_inverse<C>(s, w, {w_row, w_column}, [&](int slot) {
    const Start to = start(first + slot, channels, channels, 0, w_channel);
    return Start{to.offset + share * w_share, to.exists};
  });
}
