// For the files that need Python's headers: their library exports only functions marked with this.
#pragma once

#define SYMM_CP_EXPORT extern "C" __attribute__((visibility("default")))
