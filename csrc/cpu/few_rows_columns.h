// Splits a product of few rows among dot_products: included once in namespace numbers and once in vectors.

// All rows of y at columns col, col + step, .. (kStreams of them).
template <class T>
HYBRIDPAR_INLINE void columns(const Product<T>& p, int64_t col, int64_t step) {
  int64_t row = 0;
  for (; row + 4 <= p.rows; row += 4) dot_products<4>(p, row, col, step);
  if (p.rows - row >= 2) {
    dot_products<2>(p, row, col, step);
    row += 2;
  }
  if (p.rows - row) dot_products<1>(p, row, col, step);
}

// Columns [begin, end) of y, of which there are kStreams at least.
template <class T>
HYBRIDPAR_INLINE void few_rows_any(const Product<T>& p, int64_t begin, int64_t end) {
  const int64_t step = (end - begin) / kStreams;
  for (int64_t i = 0; i < step; ++i) columns(p, begin + i, step);
  if (begin + kStreams * step < end) columns(p, end - kStreams, 1);  // what is left, and some of it again
}
