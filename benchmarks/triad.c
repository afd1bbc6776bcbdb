// STREAM's triad, a = b + 3 c over doubles, as its authors count it: 24 bytes an element, whatever the caches move besides.
// Stores are plain, as STREAM is written, or go past the caches, as some compilers make them: then nothing is read to be
// overwritten, and 24 bytes are what moves.
#include <immintrin.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/mman.h>

// Zeros, on huge pages where the system has them, so that looking up pages holds nothing back; null without memory. For good.
double* stream_array(ptrdiff_t n) {
  double* x = aligned_alloc(1 << 21, n * sizeof(double));
  if (x == NULL) return NULL;
  madvise(x, n * sizeof(double), MADV_HUGEPAGE);
#pragma omp parallel for
  for (ptrdiff_t i = 0; i < n; ++i) x[i] = 0;
  return x;
}

void triad_plain(double* a, const double* b, const double* c, ptrdiff_t n) {
#pragma omp parallel for
  for (ptrdiff_t i = 0; i < n; ++i) a[i] = b[i] + 3.0 * c[i];
}

// n: even
void triad_past_caches(double* a, const double* b, const double* c, ptrdiff_t n) {
  const __m128d three = _mm_set1_pd(3.0);
#pragma omp parallel
  {
#pragma omp for
    for (ptrdiff_t i = 0; i < n; i += 2)
      _mm_stream_pd(a + i, _mm_add_pd(_mm_load_pd(b + i), _mm_mul_pd(three, _mm_load_pd(c + i))));
    _mm_sfence();
  }
}
