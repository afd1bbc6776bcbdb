// The end of what vectors.h began.
#pragma GCC pop_options
