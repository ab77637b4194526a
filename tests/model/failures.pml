/* Ranks that give up a call, or refuse to make it, and go on with the next one (csrc/channel/channel.h); and
 * calls that go through the slot in pieces, of which the ranks have different numbers
 * (csrc/exchange/exchange.h).
 *
 * Checked: nobody takes data of another call, or half of it, for that of its call; when nobody gives
 * up any more, every rank comes to its end.
 *
 *   RANKS, CALLS, QUITS   the size of what is searched; how often a rank gives up or refuses
 *   NO_MARK     a rank that failed a call does not mark it: must fail
 *   NO_DEBT     nor does it wait, before the next call, for peers to come to that one: must fail
 *   NO_VERIFY   data is not looked at again when it has been read: must fail
 *   EARLY_LOOK  a rank that waits compares where data lies with the ranks that are in its call, before
 *               it has announced where its own does: must fail
 *   PIECES      the most pieces of a call; 0: all calls have one
 *   ONE_HALF    all pieces of a call use the same half of the slot: must fail
 *   SHORT_MARK  a rank that gives up raises its flags to the first piece only: must fail
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

#ifndef PIECES
#define PIECES 0
#endif
#ifdef ONE_HALF
#define HALF 0
#else
#define HALF (piece % 2)
#endif

/* Flags are raised to a call and a piece of it, from 0 to 3. */
#define TICKET(piece) (call * 4 + piece)
#ifdef SHORT_MARK
#define LAST 0
#else
#define LAST 3
#endif
#define READY 0
#define DONE 1
#define FLAG(name, at, by) flags[(name * RANKS + at) * RANKS + by]
#define PLACE(of) (call % 2 * RANKS + of)
byte flags[2 * RANKS * RANKS];  /* up to which call and piece a rank has raised it */
byte records[2 * RANKS];        /* which call the rank has announced */
bool failed[2 * RANKS];         /* and whether it has failed it since */
byte pieces[2 * RANKS];         /* how many it has there */
byte slots[2 * RANKS];          /* which call's data is there, written whole; 0 meanwhile */
byte halves[4 * RANKS];         /* the same in pieces: which call's and piece's */
byte symmetric[RANKS];          /* the same, of the caller's own memory, read in place */
byte kinds[CALLS + 1];          /* of each call: 1 it reads slots, 2 in place, 3 in pieces */

#define EACH_PEER peer = (me + 1) % RANKS; do :: peer == me -> break :: else -> atomic {
#define NEXT_PEER peer = (peer + 1) % RANKS } od

/* A rank that has waited for a while looks at all that are in its call. They read slots (1) or in
 * place (2); until it has announced its own call, the rank is taken to read slots. */
#ifdef EARLY_LOOK
#define PLACE_OF_MINE (records[PLACE(me)] == call -> kinds[call] : 1)
#else
#define PLACE_OF_MINE kinds[call]
#endif
#define AGREES(other) \
	(records[PLACE(other)] != call || failed[PLACE(other)] || PLACE_OF_MINE == kinds[call])
/* A time-out, Ctrl-C, an exception: at any wait. */
#define AWAIT(condition) assert(AGREES(0) && AGREES(1) && AGREES(RANKS - 1)); if :: condition :: quits < QUITS -> quits++; goto give_up fi
#define WAIT(name, piece) AWAIT(FLAG(name, me, peer) >= TICKET(piece))
#define SIGNAL(name, piece) EACH_PEER FLAG(name, peer, me) = TICKET(piece); NEXT_PEER
#define IN_HALF(of) halves[(call % 2 * 2 + HALF) * RANKS + of]
#define DATA (kinds[call] == 1 -> slots[PLACE(peer)] : symmetric[peer])
#define OF_THIS_CALL (records[PLACE(peer)] == call && !failed[PLACE(peer)])

active [RANKS] proctype Rank() {
	byte me = _pid, peer, call, debt, quits, piece, last;
	bool torn;
next:
	if
	:: call == CALLS -> goto finished
	:: else -> atomic {
		call++;
		if
		:: kinds[call] != 0
#if PIECES == 0
		:: else -> if :: kinds[call] = 1 :: kinds[call] = 2 fi
#else
		:: else -> if :: kinds[call] = 2 :: kinds[call] = 3 fi
#endif
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
			AWAIT(FLAG(READY, me, peer) >= debt * 4 || FLAG(DONE, me, peer) >= debt * 4)
		NEXT_PEER;
		debt = 0
	:: else
	fi;
#endif
	torn = false;
	piece = 0;
	if
#if PIECES > 0
	:: kinds[call] == 3 -> select(last : 1 .. PIECES); goto in_pieces
#endif
	:: else
	fi;
	if
	:: kinds[call] == 1 -> slots[PLACE(me)] = 0; slots[PLACE(me)] = call
	:: else -> symmetric[me] = call
	fi;
	d_step { failed[PLACE(me)] = false; records[PLACE(me)] = call };
	SIGNAL(READY, 0);
	EACH_PEER
		WAIT(READY, 0);
		if :: OF_THIS_CALL :: else -> goto give_up fi;
		torn = torn || DATA != call
	} atomic {  /* reading takes time */
		torn = torn || DATA != call;
	NEXT_PEER;
	if
	:: kinds[call] == 2 -> SIGNAL(DONE, 0); EACH_PEER WAIT(DONE, 0); NEXT_PEER
	:: else
	fi;
verify:
#ifndef NO_VERIFY
	EACH_PEER
		if :: OF_THIS_CALL :: else -> goto give_up fi;
	NEXT_PEER;
#endif
	assert(!torn);
	symmetric[me] = 0;  /* the caller's again */
	goto next;
in_pieces:
	do
	:: piece == last -> goto verify
	:: else ->
		IN_HALF(me) = 0;
		IN_HALF(me) = TICKET(piece);
		if
		:: piece == 0 -> d_step {
			failed[PLACE(me)] = false;
			pieces[PLACE(me)] = last;
			records[PLACE(me)] = call
		}
		:: else
		fi;
		SIGNAL(READY, piece);
		EACH_PEER
			WAIT(READY, piece);
			if :: OF_THIS_CALL :: else -> goto give_up fi;
			if
			:: piece == 0 && pieces[PLACE(peer)] > last -> last = pieces[PLACE(peer)]
			:: else
			fi;
			torn = torn || IN_HALF(peer) != TICKET(piece)
		} atomic {
			torn = torn || IN_HALF(peer) != TICKET(piece);
		NEXT_PEER;
		piece++
	od;
give_up:
	skip;
#ifndef NO_MARK
	d_step { if :: records[PLACE(me)] == call -> failed[PLACE(me)] = true :: else fi };
#endif
	SIGNAL(READY, LAST);
	SIGNAL(DONE, LAST);
	debt = call;
	symmetric[me] = 0;
	goto next;
finished:
	skip
}
