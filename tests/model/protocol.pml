/* How the calls of a group share a workspace of two slots (symm_cp/schedule/README.md), with
 * epochs that wrap around, workspaces that are replaced, and ranks that die at any moment.
 *
 * Checked: nobody reads memory that is not of the call, whole; nobody who lives waits for ever.
 *
 *   RANKS, CALLS   the size of what is searched
 *   WRAP           a workspace is not replaced before its epochs wrap around: must fail
 *   DENSE          only flags that every call raises: wrapping around would do no harm then
 *   DEATHS         ranks may die
 *   HASTY, SINGLE  an in-place call that does not wait for its readers; one slot: must fail
 */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef CALLS
#define CALLS 7
#endif
#ifdef SINGLE
#define SLOTS 1
#else
#define SLOTS 2
#endif

/* Epochs of 3 bits stand for those of 32, and kLastEpoch of wire.h is half of what there is. */
#define EPOCHS 8
#define LAST (EPOCHS / 2 - 1)
#define ARRIVED(seen, epoch) (((seen) - (epoch) + EPOCHS) % EPOCHS < EPOCHS / 2)

mtype = { gather, two_shot, in_place };
#define READY 0
#define REDUCED 1
#define DONE 2

/* Two generations of workspaces: a third cannot be in use, as all ranks meet to make one. */
#define FLAG(name, at, by) flags[((generation % 2 * 3 + name) * RANKS + at) * RANKS + by]
#define PLACE(of) ((generation % 2 * 2 + epoch % SLOTS) * RANKS + of)
byte flags[12 * RANKS * RANKS];
/* Which call's data is there, written whole; 0 while it is being written. */
byte slots[4 * RANKS];
byte sums[4 * RANKS];      /* the part of a slot that its owner reduces */
byte symmetric[RANKS];
byte meeting[RANKS];       /* which workspace a rank has asked the others to make */
mtype calls[CALLS + 1];
bool gone[RANKS];          /* died, or gave up */

/* For each peer, by turns. */
#define EACH_PEER peer = (me + 1) % RANKS; do :: peer == me -> break :: else -> atomic {
#define NEXT_PEER peer = (peer + 1) % RANKS } od

/* A rank that waits sees what it waits for, or that it does so in vain. */
#define AWAIT(condition) if :: condition :: gone[peer] -> goto give_up fi
#define WAIT(name) AWAIT(ARRIVED(FLAG(name, me, peer), epoch))
#define SIGNAL(name) EACH_PEER FLAG(name, peer, me) = epoch; NEXT_PEER

/* Reading and writing take time. What is read is of this call, at the begin and at the end. */
#define READ(what) assert(what == call) } atomic { assert(what == call)
#define WRITE(what) what = 0; what = call

inline make_workspace() {
	d_step {
		generation++;
		epoch = 0;
		/* New memory is zero. Nobody else looks at it before the ranks have met. */
		peer = 0;
		do
		:: peer == RANKS -> break
		:: else ->
			FLAG(READY, me, peer) = 0;
			FLAG(REDUCED, me, peer) = 0;
			FLAG(DONE, me, peer) = 0;
			peer++
		od;
		meeting[me] = generation
	}
	EACH_PEER AWAIT(meeting[peer] >= generation); NEXT_PEER
}

active [RANKS] proctype Rank() {
	byte me = _pid, peer, call, epoch, generation;
	{
		make_workspace();
		do
		:: call == CALLS -> goto finished
		:: else ->
			atomic {  /* any op, alike on all ranks */
				call++;
				if
				:: calls[call] != 0
				:: else ->
					if
					:: calls[call] = gather
#ifndef DENSE
					:: calls[call] = in_place
					:: calls[call] = two_shot
#endif
					fi
				fi
			}
#ifndef WRAP
			if :: epoch == LAST -> make_workspace() :: else fi;
#endif
			epoch = (epoch + 1) % EPOCHS;
			if
			:: calls[call] == gather ->
				WRITE(slots[PLACE(me)]);
				SIGNAL(READY);
				EACH_PEER WAIT(READY); READ(slots[PLACE(peer)]); NEXT_PEER
			:: calls[call] == two_shot ->
				WRITE(slots[PLACE(me)]);
				SIGNAL(READY);
				EACH_PEER WAIT(READY); READ(slots[PLACE(peer)]); NEXT_PEER;
				WRITE(sums[PLACE(me)]);
				SIGNAL(REDUCED);
				EACH_PEER WAIT(REDUCED); READ(sums[PLACE(peer)]); NEXT_PEER
			:: calls[call] == in_place ->
				WRITE(symmetric[me]);  /* the caller, before the call */
				SIGNAL(READY);
				EACH_PEER WAIT(READY); READ(symmetric[peer]); NEXT_PEER;
				SIGNAL(DONE);
#ifndef HASTY
				EACH_PEER WAIT(DONE); NEXT_PEER
#endif
			fi
		od
	} unless { gone[me] };
give_up:
	gone[me] = true;
finished:
	skip
}

#ifdef DEATHS
active proctype Death() {
	byte victim;
	select(victim : 0 .. RANKS - 1);
	gone[victim] = true
}
#endif
