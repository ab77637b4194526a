/* Ranks that give up a call, or refuse to make it, and go on with the next one (csrc/channel.h).
 *
 * Checked: nobody takes data of another call, or half of it, for that of its call; when nobody gives
 * up any more, every rank comes to its end.
 *
 *   RANKS, CALLS, QUITS   the size of what is searched; how often a rank gives up or refuses
 *   NO_MARK     a rank that failed a call does not mark it: must fail
 *   NO_DEBT     nor does it wait, before the next call, for peers to come to that one: must fail
 *   NO_VERIFY   data is not looked at again when it has been read: must fail
 */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef CALLS
#define CALLS 4
#endif
#ifndef QUITS
#define QUITS 1
#endif

#define READY 0
#define DONE 1
#define FLAG(name, at, by) flags[(name * RANKS + at) * RANKS + by]
#define PLACE(of) (call % 2 * RANKS + of)
byte flags[2 * RANKS * RANKS];  /* up to which call a rank has raised it */
byte records[2 * RANKS];        /* which call the rank has announced */
bool failed[2 * RANKS];         /* and whether it has failed it since */
byte slots[2 * RANKS];          /* which call's data is there, written whole; 0 meanwhile */
byte symmetric[RANKS];          /* the same, of the caller's own memory, read in place */
byte kinds[CALLS + 1];          /* of each call: 1 it reads slots, 2 it reads in place */

#define EACH_PEER peer = (me + 1) % RANKS; do :: peer == me -> break :: else -> atomic {
#define NEXT_PEER peer = (peer + 1) % RANKS } od

/* A time-out, Ctrl-C, an exception: at any wait. */
#define AWAIT(condition) if :: condition :: quits < QUITS -> quits++; goto give_up fi
#define WAIT(name) AWAIT(FLAG(name, me, peer) >= call)
#define SIGNAL(name) EACH_PEER FLAG(name, peer, me) = call; NEXT_PEER
#define DATA (kinds[call] == 1 -> slots[PLACE(peer)] : symmetric[peer])
#define OF_THIS_CALL (records[PLACE(peer)] == call && !failed[PLACE(peer)])

active [RANKS] proctype Rank() {
	byte me = _pid, peer, call, debt, quits;
	bool torn;
next:
	if
	:: call == CALLS -> goto finished
	:: else -> atomic {
		call++;
		if
		:: kinds[call] != 0
		:: else -> if :: kinds[call] = 1 :: kinds[call] = 2 fi
		fi
	}
	fi;
	if
	:: true
	:: quits < QUITS -> quits++; goto give_up  /* refuses it, without a wait */
	fi;
#ifndef NO_DEBT
	if
	:: debt != 0 ->
		EACH_PEER
			AWAIT(FLAG(READY, me, peer) >= debt || FLAG(DONE, me, peer) >= debt)
		NEXT_PEER;
		debt = 0
	:: else
	fi;
#endif
	torn = false;
	if
	:: kinds[call] == 1 -> slots[PLACE(me)] = 0; slots[PLACE(me)] = call
	:: else -> symmetric[me] = call
	fi;
	d_step { failed[PLACE(me)] = false; records[PLACE(me)] = call };
	SIGNAL(READY);
	EACH_PEER
		WAIT(READY);
		if :: OF_THIS_CALL :: else -> goto give_up fi;
		torn = torn || DATA != call
	} atomic {  /* reading takes time */
		torn = torn || DATA != call;
	NEXT_PEER;
	if
	:: kinds[call] == 2 -> SIGNAL(DONE); EACH_PEER WAIT(DONE); NEXT_PEER
	:: else
	fi;
#ifndef NO_VERIFY
	EACH_PEER
		if :: OF_THIS_CALL :: else -> goto give_up fi;
	NEXT_PEER;
#endif
	assert(!torn);
	symmetric[me] = 0;  /* the caller's again */
	goto next;
give_up:
	skip;
#ifndef NO_MARK
	d_step { if :: records[PLACE(me)] == call -> failed[PLACE(me)] = true :: else fi };
#endif
	SIGNAL(READY);
	SIGNAL(DONE);
	debt = call;
	symmetric[me] = 0;
	goto next;
finished:
	skip
}
