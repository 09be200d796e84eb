// The same program as C++17.
#include "../c/header_alone.c"
