// From signals through products with filters' spectra to signals; depthwise1d.cu says how. Tiles and images of a channel
// follow one another, so that a filter's spectrum stays in the cache.

extern "C" __global__ void BOUNDS depthwise1d_image(const Real* __restrict__ x, const float2* __restrict__ spectra,
                                                    Result* __restrict__ y, i64 signals, i64 images, i64 tiles,
                                                    i64 tile, i64 x_channel, i64 x_image, i64 x_step, i64 x_length,
                                                    i64 x_first, i64 y_channel, i64 y_image, i64 y_step, i64 y_length,
                                                    i64 y_first) {
  extern __shared__ float4 shared[];
  const int slot = threadIdx.x / T, t = threadIdx.x % T;
  float2* s = (float2*)shared + slot * SIGNAL;
  const Signal me(blockIdx.x * (unsigned)SIGNALS + slot, (unsigned)signals, (unsigned)images, (unsigned)tiles);
  const int begin = (int)(me.tile * tile), place = begin * APART_RESULT;
  to_rows<PAIRED_FIRST, APART_FIRST>(x + me.channel * x_channel + me.image * x_image,
                                     {x_step, place + (int)x_first, 0, (int)x_length}, t, T, s);
  const Rows rows(t);
  RowPair r;
  rows_forward(s, rows, r);
  const float2* f = spectra + (i64)SPECTRUM * me.channel + t;
  each_pair(t, [&](int i, int m, int at, float2 w) {
    float2 low, high;
    pair_product<(CORRELATE != 0)>(r[i], r[m], __ldg(f + 2 * at * T), __ldg(f + (2 * at + 1) * T), w, low, high);
    r[i] = low;
    if (m != i) r[m] = high;
  });
  rows_inverse(r, rows, s);
  const int end = y_length - begin < tile ? (int)y_length : begin + (int)tile;
  from_rows<PAIRED_RESULT, APART_RESULT>(s, t, y + me.channel * y_channel + me.image * y_image,
                                         {y_step, place + (int)y_first, begin, me.exists ? end : begin});
}
