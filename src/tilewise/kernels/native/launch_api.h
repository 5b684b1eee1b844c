/* What launches.c offers to other native modules: how they queue a LaunchList. It is C and C++. */

#ifndef TILEWISE_LAUNCH_API_H
#define TILEWISE_LAUNCH_API_H

#include <Python.h>

#include <stdint.h>

#define LAUNCH_API "launches.api"

/* The interpreter's lock is held in both. */
typedef struct {
    int (*left_to_python)(PyObject *list); /* whether Python must queue it now: 1 or 0, -1 with an error set */
    int (*queue)(PyObject *list, void *stream, const uint64_t *addresses); /* 0, or -1 with an error set */
} LaunchApi;

#endif
